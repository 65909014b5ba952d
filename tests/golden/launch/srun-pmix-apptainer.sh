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
  apptainer exec --nv --bind '/home/me/it'"'"'s a run' --bind /data:/data:ro '/images/it'"'"'s.sif' python3 -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
