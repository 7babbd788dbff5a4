# With CUDA: docker build -t accel-trainer .
#            docker run --gpus all --ipc host -v runs:/app/runs accel-trainer accel-trainer launch recipes/cifar.py
# CPU only:  docker build --target cpu -t accel-trainer:cpu .
# It runs as the user `trainer` (1000): a folder of the host in place of the volume must let that user write.
FROM python:3.11-slim AS source
RUN useradd --create-home --uid 1000 trainer && install --directory --owner trainer /app/runs
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY accel_trainer ./accel_trainer
COPY recipes ./recipes
COPY accelerate_configs ./accelerate_configs
# The launcher forwards signals and returns the run's exit code, so it must be process 1 itself: no shell.
CMD ["accel-trainer", "launch", "recipes/cifar.py", "--dataset", "digits"]

FROM source AS cpu
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu '.[vision,report]'
USER trainer

# The last stage is the default. The torch of PyPI brings CUDA.
FROM source AS cuda
RUN pip install --no-cache-dir -c constraints.txt '.[vision,report]'
USER trainer
