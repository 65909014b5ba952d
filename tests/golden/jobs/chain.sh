#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=10
# The job's folder is the run directory, by sbatch --chdir. A job that starts again continues its log.
#SBATCH --output=logs/job-%j.log
#SBATCH --open-mode=append
# The next job of the chain goes on where this one has to stop.
#SBATCH --no-requeue
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

# What is done or has failed, even before hpctrain began, leaves nothing to do for the later jobs of the chain. After TERM
# they are those of whoever sent it. Their numbers were written down at submission, one a line.
# shellcheck disable=SC2317
end_chain() {
  local code=$?
  if (( code != 4 )) && [[ $asked != TERM ]]; then
    sed "0,/^$SLURM_JOB_ID\$/d" '/home/me/it'"'"'s a run'/chain | xargs --no-run-if-empty scancel || true
  fi
}
trap end_chain EXIT

# From here on a variable that is not set is a mistake; modules and setup lines use some on purpose.
set -u

# The plan's relative paths begin where the job was submitted from.
cd -- /home/me
run_dir='/home/me/it'"'"'s a run'

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
# It takes the job's hosts, orders them, starts the ranks, and goes on from the newest checkpoint if there is one.
if [[ ! $asked ]]; then
  follow hpctrain run --resume --run-dir "$run_dir"
  # Bash 5.2 loses a status that comes together with a signal, and says -1: to go on with a run that is done is harmless.
  # And one that USR2 has ended was told before it could listen: nothing had begun.
  if (( status < 0 )) || { [[ $asked ]] && (( status == 128 + $(kill -l USR2) )); }; then
    status=4
  fi
fi
# What comes from here on is not why it ended.
trap : USR2 TERM

# 4 is not finished, but resumable.
if (( status == 4 )); then
  job_dir='/home/me/it'"'"'s a run'
  {
    printf 'hpctrain: not finished; the next job of the chain goes on. After the last one:\n '
    printf ' %q' sbatch --chdir="$job_dir" "$job_dir"/job.sh
    echo
  } >&2
fi

# Slurm counts what is not finished as failed, and so does `afternotok`.
exit "$status"
