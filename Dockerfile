# docker build -t accel-trainer .
# docker run --gpus all --ipc host -v "$PWD/runs:/app/runs" accel-trainer accel-trainer launch recipes/cifar.py
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY accel_trainer ./accel_trainer
COPY recipes ./recipes
COPY accelerate_configs ./accelerate_configs
RUN pip install --no-cache-dir -c constraints.txt '.[vision,report]'
# The launcher forwards signals and returns the run's exit code, so it must be process 1 itself: no shell.
CMD ["accel-trainer", "launch", "recipes/cifar.py", "--dataset", "digits"]
