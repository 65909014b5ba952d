/opt/mpi/bin/mpirun \
  -n 6 \
  -hosts n3:4,n1:2 \
  -bind-to core:2 \
  -genv HPCTRAIN_BACKEND mpi \
  -genv HPCTRAIN_BACKEND_REASON 'no GPU on n1' \
  -genv MKL_NUM_THREADS 3 \
  -genv OMP_NUM_THREADS 3 \
  -genv OPENBLAS_NUM_THREADS 3 \
  -genv PYTHONUNBUFFERED 1 \
  -genv TF_CPP_MIN_LOG_LEVEL 2 \
  -genv TF_NUM_INTEROP_THREADS 1 \
  -genv TF_NUM_INTRAOP_THREADS 3 \
  -genv A 1,2 \
  -v \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
