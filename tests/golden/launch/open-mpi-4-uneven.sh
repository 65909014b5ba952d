/opt/mpi/bin/mpirun \
  -np 6 \
  --host n3:4,n1:2 \
  --map-by slot:PE=2 \
  --bind-to core \
  --mca osc '^ucx' \
  -x HPCTRAIN_BACKEND=mpi \
  -x 'HPCTRAIN_BACKEND_REASON=no GPU on n1' \
  -x MKL_NUM_THREADS=3 \
  -x OMP_NUM_THREADS=3 \
  -x OPENBLAS_NUM_THREADS=3 \
  -x PYTHONUNBUFFERED=1 \
  -x TF_CPP_MIN_LOG_LEVEL=2 \
  -x TF_NUM_INTEROP_THREADS=1 \
  -x TF_NUM_INTRAOP_THREADS=3 \
  -x A=1,2 \
  -v \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
