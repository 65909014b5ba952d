printf %s 'n1:2
' > '/home/me/it'"'"'s a run/hostfile' &&
/opt/mpi/bin/mpirun \
  -n 2 \
  -machinefile '/home/me/it'"'"'s a run/hostfile' \
  -genv I_MPI_PIN_DOMAIN auto:compact \
  -genv HPCTRAIN_BACKEND mpi \
  -genv HPCTRAIN_BACKEND_REASON 'no GPU on n1' \
  -genv MKL_NUM_THREADS 4 \
  -genv OMP_NUM_THREADS 4 \
  -genv OPENBLAS_NUM_THREADS 4 \
  -genv PYTHONUNBUFFERED 1 \
  -genv TF_CPP_MIN_LOG_LEVEL 2 \
  -genv TF_NUM_INTEROP_THREADS 1 \
  -genv TF_NUM_INTRAOP_THREADS 4 \
  /venv/bin/python -P -m hpctrain.worker.train '/home/me/it'"'"'s a run'
