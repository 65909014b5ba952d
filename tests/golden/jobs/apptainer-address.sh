#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --partition=gpu
#SBATCH --account=project-1
#SBATCH --nodes=1
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

# Fetched and converted once: ranks that find it in the cache need not do so all at a time.
apptainer exec docker://a/b true

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
