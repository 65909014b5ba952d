printf %s 'n3
n3
n3
n3
n1
n1
' > '/home/me/it'"'"'s a run/hostfile' &&
env \
  -u SLURM_HINT \
  -u SLURM_NTASKS_PER_NODE \
  -u SLURM_THREADS_PER_CORE \
  -u SRUN_CPUS_PER_TASK \
  HPCTRAIN_BACKEND=mpi \
  'HPCTRAIN_BACKEND_REASON=no GPU on n1' \
  MKL_NUM_THREADS=3 \
  OMP_NUM_THREADS=3 \
  OPENBLAS_NUM_THREADS=3 \
  PYTHONUNBUFFERED=1 \
  TF_CPP_MIN_LOG_LEVEL=2 \
  TF_NUM_INTEROP_THREADS=1 \
  TF_NUM_INTRAOP_THREADS=3 \
  A=1,2 \
  'SLURM_HOSTFILE=/home/me/it'"'"'s a run/hostfile' \
  srun \
  --mpi=pmix \
  --nodes=2 \
  --ntasks=6 \
  --distribution=arbitrary \
  --export=ALL \
  --kill-on-bad-exit=1 \
  --overlap \
  --cpus-per-task=2 \
  --threads-per-core=1 \
  --cpu-bind=cores \
  --mem=0 \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
