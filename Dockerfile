# rlboost[train] with torch for CPUs: to check, plan, launch and watch runs, and to try the quickstart.
#   docker build -t rlboost .
#   docker build -t rlboost --build-arg EXTRAS=train,aws,gcp,ssh,sky .
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY rlboost_cli rlboost_cli
COPY runtime runtime
COPY providers providers
COPY templates templates
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim
ARG EXTRAS=train,ssh
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends openssh-client \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /dist /dist
RUN wheel=$(echo /dist/rlboost-*.whl) \
    && pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$wheel[$EXTRAS]" \
    && rm -r /dist
RUN useradd --create-home rlboost && install -d -o rlboost /home/rlboost/.rlboost
USER rlboost
WORKDIR /home/rlboost
VOLUME /home/rlboost/.rlboost
CMD ["rlboost", "--help"]
