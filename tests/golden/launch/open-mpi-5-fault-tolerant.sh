/opt/mpi/bin/mpirun \
  -np 6 \
  --host n3:4,n1:2 \
  --map-by slot:PE=2 \
  --bind-to core \
  --mca osc '^ucx' \
  -x HPCTRAIN_BACKEND=mpi \
  -x MKL_NUM_THREADS=2 \
  -x OMP_NUM_THREADS=2 \
  -x OPENBLAS_NUM_THREADS=2 \
  -x PYTHONUNBUFFERED=1 \
  -x TF_CPP_MIN_LOG_LEVEL=2 \
  -x TF_NUM_INTEROP_THREADS=1 \
  -x TF_NUM_INTRAOP_THREADS=2 \
  --with-ft ulfm \
  --prtemca oob_tcp_keepalive_time 21 \
  --prtemca oob_tcp_keepalive_intvl 6 \
  --prtemca oob_tcp_keepalive_probes 4 \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
