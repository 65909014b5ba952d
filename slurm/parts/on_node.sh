# What one node does for its copy of a packed environment, in a bash of its own:
#   find ENVIRONMENTS DIGEST BYTES           says missing where it is not there, and fails where there is no room for it
#   unpack ENVIRONMENTS DIGEST SHA256 FILE   makes it of the archive that was sent to FILE
set -u
action=$1 environments=$2 digest=$3
environment=$environments/$digest

fail() {
  echo "hpctrain: $(hostname): $1" >&2
  exit 1
}

find_environment() {
  if [[ -e $environment/pyvenv.cfg ]]; then
    touch -- "$environment"
    return
  fi
  # Others that were last used an hour ago, and that nothing runs from, make room.
  find "$environments" -mindepth 1 -maxdepth 1 ! -name .lock -mmin +60 -print0 | while IFS= read -r -d '' other; do
    if ! readlink /proc/[0-9]*/exe | grep -qF -- "$other/"; then
      rm -rf -- "$environments"/.old
      mv -T -- "$other" "$environments"/.old && rm -rf -- "$environments"/.old
    fi
  done
  free=$(df --block-size=1 --output=avail -- "$environments" | tail -n 1)
  (( free >= $1 )) || fail "no space left in $environments: the environment takes $1 bytes, and $free are free"
  echo missing
}

unpack_environment() {
  # Another job's may have come first.
  if [[ ! -e $environment/pyvenv.cfg ]]; then
    sha256sum --check --status - <<< "$1  $2" || fail "the environment did not arrive as it was sent (SHA-256)"
    new=$environments/.new
    rm -rf -- "$new"
    mkdir -- "$new" || fail "$new cannot be made"
    tar -xzf "$2" -C "$new" --no-same-owner || fail "the environment cannot be unpacked in $environments"
    # Of an environment only this line says where it is.
    echo "home = $environment/base/bin" >> "$new"/pyvenv.cfg
    mv -T -- "$new" "$environment" || fail "$environment cannot be made"
  fi
  rm -f -- "$2"
  "$environment"/bin/python -c "" || fail "the environment's Python does not run here"
}

umask 077
mkdir -p -- "$environments" || fail "$environments cannot be made: node_storage in the profile names its place"
[[ -O $environments && ! -L $environments ]] || fail "$environments belongs to somebody else"
exec 9> "$environments"/.lock
flock --wait 900 9 || fail "waited 900 s for another job that unpacks an environment in $environments"
"$action"_environment "${@:4}"
