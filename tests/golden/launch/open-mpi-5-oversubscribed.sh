/opt/mpi/bin/mpirun \
  -np 2 \
  --host n1:2 \
  --bind-to none \
  --mca mpi_yield_when_idle 1 \
  --mca osc '^ucx' \
  --oversubscribe \
  -x HPCTRAIN_BACKEND=mpi \
  -x 'HPCTRAIN_BACKEND_REASON=no GPU on n1' \
  -x MKL_NUM_THREADS=4 \
  -x OMP_NUM_THREADS=4 \
  -x OPENBLAS_NUM_THREADS=4 \
  -x PYTHONUNBUFFERED=1 \
  -x TF_CPP_MIN_LOG_LEVEL=2 \
  -x TF_NUM_INTEROP_THREADS=1 \
  -x TF_NUM_INTRAOP_THREADS=4 \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
