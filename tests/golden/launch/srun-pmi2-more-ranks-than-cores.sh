printf %s 'n1
n1
n1
n1
n1
n1
n1
n1
n1
n2
n2
n2
n2
n2
n2
n2
n2
n2
' > '/home/me/it'"'"'s a run/hostfile' &&
env \
  -u SLURM_HINT \
  -u SLURM_NTASKS_PER_NODE \
  -u SLURM_THREADS_PER_CORE \
  -u SRUN_CPUS_PER_TASK \
  HPCTRAIN_BACKEND=mpi \
  'HPCTRAIN_BACKEND_REASON=no GPU on n1' \
  MKL_NUM_THREADS=1 \
  OMP_NUM_THREADS=1 \
  OPENBLAS_NUM_THREADS=1 \
  PYTHONUNBUFFERED=1 \
  TF_CPP_MIN_LOG_LEVEL=2 \
  TF_NUM_INTEROP_THREADS=1 \
  TF_NUM_INTRAOP_THREADS=1 \
  OMPI_MCA_mpi_yield_when_idle=1 \
  'SLURM_HOSTFILE=/home/me/it'"'"'s a run/hostfile' \
  srun \
  --mpi=pmi2 \
  --nodes=2 \
  --ntasks=18 \
  --distribution=arbitrary \
  --export=ALL \
  --kill-on-bad-exit=1 \
  --overlap \
  --overcommit \
  --cpu-bind=none \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
