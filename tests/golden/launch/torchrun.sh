env \
  -u OMPI_COMM_WORLD_SIZE \
  -u PMI_SIZE \
  -u SLURM_STEP_NUM_TASKS \
  -u TORCHELASTIC_RUN_ID \
  HPCTRAIN_BACKEND=gloo \
  HPCTRAIN_BACKEND_REASON=torchrun \
  MKL_NUM_THREADS=3 \
  OMP_NUM_THREADS=3 \
  OPENBLAS_NUM_THREADS=3 \
  PYTHONUNBUFFERED=1 \
  TF_CPP_MIN_LOG_LEVEL=2 \
  TF_NUM_INTEROP_THREADS=1 \
  TF_NUM_INTRAOP_THREADS=3 \
  A=1,2 \
  /venv/bin/python \
  -P \
  -m hpctrain.worker.programs.torchrun \
  --nnodes=2 \
  --nproc-per-node=2 \
  --max-restarts=0 \
  --rdzv-backend=one-address \
  --rdzv-conf=rank=1 \
  --rdzv-endpoint=n3:20286 \
  --rdzv-id=attempt-1 \
  --no-python \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
