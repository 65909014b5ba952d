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
# USR2 comes 120 s before the time limit, to this shell alone; TERM when the job is cancelled, preempted or requeued.
asked='' pid='' again=''
tell() { [[ ! $pid ]] || kill -s "$asked" "$pid" || true; }
trap 'again=yes asked=USR2; tell' USR2
trap 'again=yes asked=TERM; tell' TERM

# What is done or has failed, even before hpctrain began, leaves nothing to do for the later jobs of the chain. After TERM
# they are those of whoever sent it. Their numbers were written down at submission, one a line.
# shellcheck disable=SC2317
end_chain() {
  if (( $? != 4 )) && [[ $asked != TERM ]]; then
    sed "0,/^$SLURM_JOB_ID\$/d" '/home/me/it'"'"'s a run'/chain | xargs --no-run-if-empty scancel || true
  fi
}
trap end_chain EXIT

# The plan's relative paths begin where the job was submitted from.
cd -- /home/me
# hpctrain prepares the nodes, runs the training or resumes it, and lets the job go on if that is not finished, as job.json
# in the run directory says. In the background, because bash acts on a signal only when the foreground's command has ended.
job() {
  local told=$asked
  hpctrain job '/home/me/it'"'"'s a run' ${told:+"$told"} & pid=$!
  [[ $told == "$asked" ]] || tell
  again=yes
  # A signal also ends wait, which is then asked again for hpctrain's own status.
  while [[ $again ]]; do again='' status=0; wait "$pid" || status=$?; done
}
job
# A signal that came before hpctrain listened has ended it: it is told at its next start.
while [[ $asked ]] && (( status == 128 + $(kill -l USR2) || status == 128 + $(kill -l TERM) )); do job; done
# Bash 5.2 loses a status that comes together with a signal, and says -1: to go on with a run that is done is harmless.
exit $(( status < 0 ? 4 : status ))
