#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --partition=gpu
#SBATCH --account=project-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=h100:4
#SBATCH --mem=480G
#SBATCH --time=24:00:00
#SBATCH --exclusive
#SBATCH --mail-type=END,FAIL
#SBATCH --comment="a # and a \\"
# The job's folder is the run directory, by sbatch --chdir. A job that starts again continues its log.
#SBATCH --output=logs/job-%j.log
#SBATCH --open-mode=append
# After the failure of a node Slurm itself puts the job back in the queue.
#SBATCH --requeue
# B: is this shell, which tells hpctrain. Slurm may be up to 60 s early.
#SBATCH --signal=B:USR2@120

# A command that fails ends the job with its status, wherever it stands in a pipe.
set -eo pipefail

# USR2 comes 120 s before the time limit, to this shell alone, and is passed on: hpctrain writes a checkpoint and leaves.
# TERM (cancelled, preempted, requeued) becomes USR2 for hpctrain: by itself it reaches hpctrain on some clusters only, and
# there a second one would end all at once.
asked=
pid=
interrupted=
pass_on() {
  if [[ $asked && $pid ]]; then
    # It may have ended by itself.
    kill -s USR2 "$pid" || true
  fi
}
trap 'interrupted=yes; asked=USR2; pass_on' USR2
trap 'interrupted=yes; asked=TERM; pass_on' TERM

# Only these: what the login shell had loaded came with the job.
module purge
module load gcc/13.2
module load openmpi/5.0.3

# The setup lines of the cluster profile.
ulimit -l unlimited

# The variables of the cluster profile.
export NCCL_DEBUG=WARN
export MOTTO='it'"'"'s $HOME'

# From here on a variable that is not set is a mistake; modules and setup lines use some on purpose.
set -u

# The plan's relative paths begin where the job was submitted from.
cd -- /home/me
run_dir='/home/me/it'"'"'s a run'

# For ranks that srun starts: since Slurm 22.05 they do not get the job's --cpus-per-task by themselves.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

once_a_node() {
  srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$@"
}

# With many ranks the import of a framework from a shared file system is slow: each node gets the packed environment
# once, as one file, and keeps it for other jobs.
pack='/home/me/it'"'"'s a cache/0123abcd.tar.gz'
environments="$TMPDIR/hpctrain-environments-$UID"
sent=$environments/.sent-$SLURM_JOB_ID
if ! read -r pack_sha256 pack_bytes unpacked_bytes < "${pack%.tar.gz}".txt; then
  echo "hpctrain: $pack is gone, or $(hostname) does not see it; hpctrain submit --pack makes it, in XDG_CACHE_HOME" >&2
  exit 2
fi
# An archive that is used is kept.
touch -c -- "$pack" "${pack%.tar.gz}".txt || true
on_node=$(cat << 'END'
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
END
)
missing=$(once_a_node bash -c "$on_node" bash find "$environments" 0123abcd $((pack_bytes + unpacked_bytes)))
if [[ $missing ]]; then
  begin=$SECONDS
  if ! sbcast --force "$pack" "$sent"; then
    once_a_node rm -f -- "$sent" || true
    echo "hpctrain: sbcast could not send $pack to $sent on each node" >&2
    exit 1
  fi
  arrived=$SECONDS
  if ! once_a_node bash -c "$on_node" bash unpack "$environments" 0123abcd "$pack_sha256" "$sent"; then
    if ! sha256sum --check --status - <<< "$pack_sha256  $pack"; then
      rm -f -- "$pack" "${pack%.tar.gz}".txt
      echo "hpctrain: $pack was damaged, and is removed; hpctrain submit --pack makes it again" >&2
    fi
    exit 1
  fi
  echo "hpctrain: the environment was sent to each node in $((arrived - begin)) s, and unpacked in $((SECONDS - arrived)) s" >&2
else
  echo "hpctrain: each node has the environment already" >&2
fi
export VIRTUAL_ENV="$environments"/0123abcd PATH="$environments/0123abcd/bin:$PATH"

# In the background, because bash acts on a signal only when the command in the foreground has ended.
follow() {
  "$@" &
  pid=$!
  # A signal that came before it had a number.
  pass_on
  # A signal also ends wait, which is then asked again for hpctrain's own status.
  interrupted=yes
  while [[ $interrupted ]]; do
    interrupted=
    status=0
    wait "$pid" || status=$?
  done
  pid=
}
status=4
begun=
# It takes the job's hosts, orders them, starts the ranks, and goes on from the newest checkpoint if there is one.
if [[ ! $asked ]]; then
  follow hpctrain run --resume --run-dir "$run_dir"
  # Bash 5.2 loses a status that comes together with a signal, and says -1: to go on with a run that is done is harmless.
  # And one that USR2 has ended was told before it could listen: nothing had begun.
  if (( status < 0 )) || { [[ $asked ]] && (( status == 128 + $(kill -l USR2) )); }; then
    status=4
  else
    begun=yes
  fi
fi
# What comes from here on is not why it ended.
trap : USR2 TERM

# 4 is not finished, but resumable: the time limit was near, or ranks were lost.
if (( status == 4 )); then
  job="$SLURM_JOB_ID"
  job_dir='/home/me/it'"'"'s a run'
  again=(--chdir="$job_dir" "$job_dir"/job.sh)
  to_go_on() {
    printf 'hpctrain: %s. To go on:\n ' "$1" >&2
    printf ' %q' sbatch "${again[@]}" >&2
    echo >&2
  }
  # Where hpctrain did not begin, it cannot see that the run gets no further: these times are counted here.
  late=0
  if [[ $begun ]]; then
    rm -f -- "$run_dir"/late
  elif [[ $asked != TERM ]]; then
    echo "$job" >> "$run_dir"/late
    late=$(wc -l < "$run_dir"/late)
  fi
  # Slurm may end all that the job runs before it answers. A requeue that went well must not look failed then: another
  # job would go on beside this one.
  to_the_queue() (
    trap '' TERM
    scontrol requeue "$job"
  )
  # Variables of the user that would go before the lines at the top.
  unset "${!SBATCH_@}"
  if [[ $asked == TERM ]] || grep -qsx cancelled "$run_dir"/stop; then
    # It is Slurm's business: a cancelled job must not come back, and a preempted one does so by itself. hpctrain cancel
    # leaves its word in the file.
    to_go_on "job $job was told to end before it was finished"
  elif (( late >= 3 )); then
    to_go_on "USR2 came before hpctrain began, $late times in a row: ask for more time (--time) or a smaller signal_seconds"
  elif echo "hpctrain: job $job is not finished and goes back to the queue" && to_the_queue; then
    # Slurm ends this shell soon after.
    :
  # Where jobs may not go back, another one goes on when this one has ended.
  elif id=$(sbatch --parsable --dependency=afterany:"$job" "${again[@]}"); then
    echo "hpctrain: job $job is not finished, so job ${id%%;*} goes on"
  else
    to_go_on "neither scontrol requeue nor sbatch works here"
  fi
fi

# Slurm counts what is not finished as failed, and so does `afternotok`.
exit "$status"
