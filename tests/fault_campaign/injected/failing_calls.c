/* Preloaded: lets calls for one file fail, as on a file server that lost a handle, or on a disk that is ill.
 *
 * FAILING_FILE   a part of the file's path
 * FAILING_CALL   "open" (for reading), "read" or "write"
 * FAILING_ERRNO  a number
 * FAILING_OF     "launcher" or "rank"
 * FAILING_WHEN   calls fail as long as this file is there
 * FAILING_ONCE   if it is "1", the first call takes that file away
 *
 * A disk that fills up (ENOSPC) takes half of what is written first.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *file, *call, *when;
static int number, once, half_written;

__attribute__((constructor)) static void begin(void)
{
    char line[65536];
    int descriptor = open("/proc/self/cmdline", O_RDONLY);
    ssize_t length = descriptor < 0 ? 0 : read(descriptor, line, sizeof line - 1);
    close(descriptor);
    line[length < 0 ? 0 : length] = 0;
    for (ssize_t at = 0; at + 1 < length; at++)
        if (!line[at])
            line[at] = ' ';
    const char *who = strstr(line, "-m hpctrain.worker.train") ? "rank" : strstr(line, "/hpctrain run ") ? "launcher" : "";
    const char *of = getenv("FAILING_OF");
    if (!of || strcmp(of, who) != 0)
        return;
    call = getenv("FAILING_CALL");
    when = getenv("FAILING_WHEN");
    number = atoi(getenv("FAILING_ERRNO"));
    once = strcmp(getenv("FAILING_ONCE"), "1") == 0;
    file = getenv("FAILING_FILE");
}

static int fails(const char *name, const char *path)
{
    if (!file || strcmp(call, name) != 0 || !strstr(path, file))
        return 0;
    return once ? unlink(when) == 0 : access(when, F_OK) == 0;
}

static int descriptor_fails(const char *name, int descriptor)
{
    char link[64], path[4096];
    if (!file || strcmp(call, name) != 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(name, path);
}

#define TRUE_CALL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name)                                                                                                    \
    int name(const char *path, int flags, ...)                                                                         \
    {                                                                                                                  \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        int mode = va_arg(rest, int);                                                                                  \
        va_end(rest);                                                                                                  \
        if ((flags & O_ACCMODE) == O_RDONLY && fails("open", path)) {                                                  \
            errno = number;                                                                                            \
            return -1;                                                                                                 \
        }                                                                                                              \
        return TRUE_CALL(name)(path, flags, mode);                                                                     \
    }

OPENS(open)
OPENS(open64)

ssize_t read(int descriptor, void *buffer, size_t count)
{
    if (descriptor_fails("read", descriptor)) {
        errno = number;
        return -1;
    }
    return TRUE_CALL(read)(descriptor, buffer, count);
}

ssize_t write(int descriptor, const void *buffer, size_t count)
{
    if (half_written) {
        half_written = 0;
        errno = number;
        return -1;
    }
    if (descriptor_fails("write", descriptor)) {
        if (number == ENOSPC && count > 1) {
            half_written = 1;
            return TRUE_CALL(write)(descriptor, buffer, count / 2);
        }
        errno = number;
        return -1;
    }
    return TRUE_CALL(write)(descriptor, buffer, count);
}
