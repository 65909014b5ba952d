printf %s 'n2
n1
' > '/home/me/it'"'"'s a run/hostfile' &&
env \
  -u SLURM_HINT \
  -u SLURM_NTASKS_PER_NODE \
  -u SLURM_THREADS_PER_CORE \
  -u SRUN_CPUS_PER_TASK \
  HPCTRAIN_BACKEND=mpi \
  'HPCTRAIN_BACKEND_REASON=no GPU on n1' \
  MKL_NUM_THREADS=8 \
  OMP_NUM_THREADS=8 \
  OPENBLAS_NUM_THREADS=8 \
  PYTHONUNBUFFERED=1 \
  TF_CPP_MIN_LOG_LEVEL=2 \
  TF_NUM_INTEROP_THREADS=1 \
  TF_NUM_INTRAOP_THREADS=8 \
  'SLURM_HOSTFILE=/home/me/it'"'"'s a run/hostfile' \
  srun \
  --mpi=pmix \
  --nodes=2 \
  --ntasks=2 \
  --distribution=arbitrary \
  --export=ALL \
  --kill-on-bad-exit=1 \
  --overlap \
  --cpus-per-task=8 \
  --threads-per-core=1 \
  --cpu-bind=cores \
  '--container-image=nvcr.io#nvidia/pytorch:25.01-py3' \
  '--container-mounts=/home/me/it'"'"'s a run:/home/me/it'"'"'s a run,/data:/data,/a:/b:ro' \
  python3 -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
