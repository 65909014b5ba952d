#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --partition=gpu
#SBATCH --account=project-1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:h100:4
#SBATCH --mem=480G
#SBATCH --time=24:00:00
#SBATCH --exclusive
#SBATCH --mail-type=END,FAIL
#SBATCH --comment="a # and a \\"
# The job's folder is the run directory that hpctrain submit makes, by sbatch --chdir. A job that starts again continues its log.
#SBATCH --output=logs/job-%j.log
#SBATCH --open-mode=append
# After the failure of a node Slurm itself puts the job back in the queue.
#SBATCH --requeue
# B: is this shell, which tells hpctrain. Slurm may be up to 60 s early.
#SBATCH --signal=B:USR2@120

# A command that fails ends the job with its status, wherever it stands in a pipe.
set -eo pipefail
# USR2 comes 120 s before the time limit, to this shell alone; TERM when the job is cancelled, preempted or requeued.
asked='' pid='' again=''
tell() { [[ ! $pid ]] || kill -s "$asked" "$pid" || true; }
trap 'again=yes asked=USR2; tell' USR2
trap 'again=yes asked=TERM; tell' TERM

# Of the cluster profile. Modules that the login shell had loaded came with the job.
module purge
module load gcc/13.2
module load openmpi/5.0.3
ulimit -l unlimited

# The environment that submitted the job: its hpctrain, Python and perhaps mpirun go before those of the system.
# shellcheck source=/dev/null
source '/home/me/my venv/bin/activate'

# The variables of the cluster profile.
export NCCL_DEBUG=WARN
export MOTTO='it'"'"'s $HOME'

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
