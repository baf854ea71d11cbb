# docker build -t caraserve:0.2.0 .                                 serves on CPUs
# docker build -t caraserve:0.2.0-cuda13 --build-arg EXTRA=cuda13 .
# docker build -t caraserve:0.2.0-cuda12 --build-arg EXTRA=cuda12 .
FROM python:3.13-slim AS build
ARG EXTRA=""
WORKDIR /src
COPY pyproject.toml README.md LICENSE scripts/constraints*.txt ./
COPY caraserve caraserve
RUN pip install uv==0.13.9
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy
RUN uv venv /opt/caraserve \
    && uv build --wheel --out-dir dist . \
    && uv pip install --python /opt/caraserve --constraint constraints.txt \
        --constraint "constraints-${EXTRA:-cuda13}.txt" "$(echo dist/*.whl)${EXTRA:+[$EXTRA]}"

FROM python:3.13-slim
ARG EXTRA=""
# Triton compiles C at its first use; Python's headers are in the image.
RUN if [ -n "$EXTRA" ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# Only these two folders and /tmp are written to: kernels and this machine's profile, and adapters uploaded to the demo.
RUN useradd --uid 1000 --create-home caraserve \
    && install --directory --owner=1000 --group=1000 /var/cache/caraserve /var/lib/caraserve
COPY --from=build /opt/caraserve /opt/caraserve
ENV PATH=/opt/caraserve/bin:$PATH \
    XDG_CACHE_HOME=/var/cache \
    XDG_DATA_HOME=/var/lib \
    HF_HOME=/var/cache/caraserve/huggingface
VOLUME ["/var/cache/caraserve", "/var/lib/caraserve"]
USER 1000
EXPOSE 8000 8001
# A start compiles kernels and reads weights first.
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('CARASERVE_PORT', '8000') + '/health')"]
ENTRYPOINT ["caraserve"]
CMD ["serve", "--host=0.0.0.0"]
