/opt/mpi/bin/mpirun \
  -np 9 \
  --host n1:9 \
  --bind-to none \
  --mca mpi_yield_when_idle 1 \
  --mca osc '^ucx' \
  -x HPCTRAIN_BACKEND=mpi \
  -x 'HPCTRAIN_BACKEND_REASON=no GPU on n1' \
  -x MKL_NUM_THREADS=1 \
  -x OMP_NUM_THREADS=1 \
  -x OPENBLAS_NUM_THREADS=1 \
  -x PYTHONUNBUFFERED=1 \
  -x TF_CPP_MIN_LOG_LEVEL=2 \
  -x TF_NUM_INTEROP_THREADS=1 \
  -x TF_NUM_INTRAOP_THREADS=1 \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
