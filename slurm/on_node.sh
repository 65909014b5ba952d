# What one node does for its copy of a packed environment, in a bash of its own:
#   find ENVIRONMENTS DIGEST BYTES           says missing where it is not there, and fails where there is no room for it
#   unpack ENVIRONMENTS DIGEST SHA256 FILE   makes it of the archive that was sent to FILE
set -u
action=$1 environments=$2 digest=$3
environment=$environments/$digest
new=$environments/.new old=$environments/.old

fail() {
  echo "hpctrain: $(hostname): $1" >&2
  exit 1
}

# What Python writes by itself does not count.
count_files() {
  find "$1" -name __pycache__ -prune -o -print | wc -l
}

# Clusters remove what lies unused in temporary folders for long, file by file.
is_whole() {
  [[ -r $environment/.files ]] && (( $(count_files "$environment") >= $(< "$environment"/.files) ))
}

require_python() {
  "$environment"/bin/python -c "" || fail "the Python of the environment does not run here: $environment/bin/python"
}

find_environment() {
  # Whoever made these was killed: nobody else has the lock.
  rm -rf -- "$new" "$old"
  find "$environments" -maxdepth 1 -name '.sent-*' -mmin +60 -delete
  if is_whole; then
    touch -- "$environment"
    require_python
    return
  fi
  # Others that were last used an hour ago, and that nothing runs from, make room.
  find "$environments" -mindepth 1 -maxdepth 1 ! -name .lock -mmin +60 -print0 | while IFS= read -r -d '' other; do
    # Where a program runs from is told without links.
    if ! readlink /proc/[0-9]*/exe | grep -qF -- "$(realpath -- "$other")/"; then
      mv -T -- "$other" "$old" && rm -rf -- "$old"
    fi
  done
  free=$(df --block-size=1 --output=avail -- "$environments" | tail -n 1)
  (( free >= $1 )) || fail "no space left in $environments: the environment takes $1 bytes, and $free are free"
  echo missing
}

unpack_environment() {
  sent=$2
  # Also where it fails: the next job may need the room.
  trap 'rm -rf -- "$sent" "$new" "$old"' EXIT
  # Another job's may have come first.
  if ! is_whole; then
    sha256sum --check --status - <<< "$1  $sent" || fail "the environment did not arrive as it was sent (SHA-256)"
    mkdir -- "$new" || fail "$new cannot be made"
    tar -xzf "$sent" -C "$new" --no-same-owner || fail "the environment cannot be unpacked in $environments"
    # Of an environment only this line says where it is.
    echo "home = $environment/base/bin" >> "$new"/pyvenv.cfg || fail "$new/pyvenv.cfg cannot be written"
    count_files "$new" > "$new"/.files || fail "$new/.files cannot be written"
    [[ ! -e $environment ]] || mv -T -- "$environment" "$old" || fail "$environment cannot be replaced"
    mv -T -- "$new" "$environment" || fail "$environment cannot be made"
  fi
  require_python
}

umask 077
mkdir -p -- "$environments" || fail "$environments cannot be made: node_storage in the profile names its place"
[[ -O $environments && ! -L $environments ]] || fail "$environments belongs to somebody else"
exec 9> "$environments"/.lock
flock --wait 900 9 || fail "waited 900 s for another job that unpacks an environment in $environments"
"$action"_environment "${@:4}"
