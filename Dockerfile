# plait on a CPU. Build: docker build -t plait .   Run: docker run -p 8000:8000 plait serve smollm2-135m
FROM python:3.11-slim-bookworm AS build

WORKDIR /src
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt README.md LICENSE CMakeLists.txt ./
COPY csrc ./csrc
COPY plait ./plait
RUN python -m venv /opt/plait \
    && PLAIT_REQUIRE_NATIVE=1 /opt/plait/bin/python -m pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim-bookworm

COPY --from=build /opt/plait /opt/plait
RUN useradd --create-home --uid 10001 plait \
    && install --directory --owner plait /cache
USER 10001
ENV PATH=/opt/plait/bin:$PATH \
    PLAIT_CACHE=/cache \
    HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["plait"]
CMD ["serve", "smollm2-135m", "--host", "0.0.0.0"]
