#!/bin/bash
# What a host of local_hosts.py does as the first process of its namespaces: files of its own, then sshd.
#   host.sh NAME FOLDER SHARED…
# FOLDER holds what all hosts know of each other (etc/, ssh/); SHARED are folders that all see at the same place.
set -eu
name=$1 folder=$2
shift 2

hostname "$name"
mount -t proc proc /proc

# A new sysfs shows the adapters of this network; the cgroups below the old one come along.
stage=$folder/$name
mkdir -p "$stage/sys" "$stage/tmp" "$stage/run"
mount -t sysfs sysfs "$stage/sys"
mount --rbind /sys/fs/cgroup "$stage/sys/fs/cgroup"
mount --rbind "$stage/sys" /sys
mount -t tmpfs -o mode=1777 shm /dev/shm

mount --bind "$folder/etc/hosts" /etc/hosts
mount --bind "$folder/etc/nsswitch.conf" /etc/nsswitch.conf
mount --bind "$folder/etc/passwd" /etc/passwd
mount --bind "$folder/ssh" /etc/ssh

# The new /tmp and /run hide what is below the old ones: what is shared is put into them first.
mount -t tmpfs -o mode=1777 tmp "$stage/tmp"
mount -t tmpfs -o mode=755 run "$stage/run"
mkdir -m 755 "$stage/run/sshd"
mkdir "$stage/run/home"
mount --bind "$folder/home" "$stage/run/home"
for path in "$@"; do
    case $path in
    /tmp/* | /run/*)
        mkdir -p "$stage$path"
        mount --bind "$path" "$stage$path"
        ;;
    esac
done
exec 8<"$stage/tmp" 9<"$stage/run"
mount --rbind /proc/self/fd/9 /run
mount --rbind /proc/self/fd/8 /tmp
cd /
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/sbin/sshd -D -e 8<&- 9<&-
