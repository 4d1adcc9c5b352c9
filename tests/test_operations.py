"""Who is let in, by the state of the server, by key, by origin: the gate and what stands around it."""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from door import Door, at
from scripted import ScriptedEngine

from plait.cli_options import take_foreign
from plait.logs import LogSettings
from plait.server import ServerSettings
from plait.server.gate import PROBES
from plait.server.tls import uvicorn_settings

# -- states ------------------------------------------------------------------------------------------


def test_while_the_model_is_loaded() -> None:
    async def use(door: Door) -> None:
        up = {"/live"}
        assert await door.statuses() == {path: 200 if path in up else 503 for path in PROBES}
        for response in (
            await door.ask(),
            await door.client.get("/ready"),
            await door.client.get("/nowhere"),
        ):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["error"]["code"] == "loading"
        door.open()
        assert set((await door.statuses()).values()) == {200}
        assert (await door.ask()).status_code == 200

    at(use)


def test_while_the_last_answers_are_given() -> None:
    async def use(door: Door) -> None:
        door.open()
        running = asyncio.ensure_future(door.ask())
        while not door.engine.open:
            await asyncio.sleep(0)
        door.gate.drain()
        empty = asyncio.ensure_future(door.gate.emptied())
        refused = await door.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert await door.statuses() == {path: 503 if path == "/ready" else 200 for path in PROBES}
        assert (await door.client.get("/v1/models")).status_code == 503
        assert (door.gate.inside, empty.done()) == (1, False)
        door.engine.aborted.set()  # it ends
        assert (await running).status_code == 200
        await empty
        assert door.gate.inside == 0

    at(use, engine=lambda: ScriptedEngine(hang_after=1))


def test_once_the_engine_has_ended() -> None:
    async def use(door: Door) -> None:
        door.open()
        door.engine.dead.set()
        up = {"/metrics", "/version"}
        assert await door.statuses() == {path: 200 if path in up else 503 for path in PROBES}
        ready = await door.client.get("/ready")
        assert int(ready.headers["retry-after"]) > 0
        assert (await door.ask()).status_code == 503

    at(use)


def test_a_request_that_fails_leaves_the_gate() -> None:
    async def use(door: Door) -> None:
        door.open()
        door.engine.dead.set()
        for _ in range(3):
            await door.ask()
        assert door.gate.inside == 0
        await door.gate.emptied()

    at(use)


def test_paths_under_which_a_proxy_shows_the_server() -> None:
    async def use(door: Door) -> None:
        assert (await door.client.get("/base/live")).status_code == 200
        assert (await door.client.get("/base/ready")).status_code == 503
        door.open()
        assert (await door.client.get("/base/ready")).status_code == 200
        assert (await door.client.get("/ready")).status_code == 200

    at(use, ServerSettings(root_path="/base"))


# -- keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "Bearer two"}, 200),
        ({"authorization": "bearer two"}, 200),
        ({"x-api-key": "two"}, 200),
        ({"authorization": "Bearer one", "x-api-key": "wrong"}, 200),
        ({}, 401),
        ({"authorization": "Bearer onetwo"}, 401),
        ({"authorization": "Bearer on"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "one"}, 401),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": "one"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_any_of_several_keys(headers: dict[str, str], status: int) -> None:
    async def use(door: Door) -> None:
        door.open()
        assert (await door.ask(**headers)).status_code == status
        assert (await door.client.get("/tokenize", headers=headers)).status_code == (
            status if status > 400 else 405
        )
        assert (await door.client.get("/ready")).status_code == 200

    at(use, ServerSettings(api_key=["one", "two"]))


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.server import keys

    compared: list[int] = []
    real = keys.secrets.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(len(a) - len(b))
        return real(a, b)

    monkeypatch.setattr(keys.secrets, "compare_digest", counting)

    async def use(door: Door) -> None:
        door.open()
        for key in ("one", "two", "none", "a much longer key than any"):
            await door.ask(authorization=f"Bearer {key}")

    at(use, ServerSettings(api_key=["one", "two"]))
    assert compared == [0] * 8  # both, each time, over texts of one length


def test_an_empty_key_is_refused() -> None:
    for key in ("", ["a", ""]):
        with pytest.raises(ValueError, match="--api-key is empty"):
            ServerSettings(api_key=key)
    assert ServerSettings(api_key=()).api_keys == ()


# -- origins -----------------------------------------------------------------------------------------

PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def test_no_origin_may_call_by_default() -> None:
    async def use(door: Door) -> None:
        door.open()
        answer = await door.ask(origin="https://page.example")
        preflight = await door.client.options(
            "/v1/chat/completions", headers={"origin": "https://page.example", **PREFLIGHT}
        )
        assert preflight.status_code == 405
        for response in (answer, preflight):
            assert not [name for name in response.headers if name.startswith("access-control")]

    at(use)


def test_origins_that_may_call() -> None:
    async def use(door: Door) -> None:
        async def preflight(origin: str) -> httpx.Response:
            return await door.client.options("/v1/models", headers={"origin": origin, **PREFLIGHT})

        for phase in ("loading", "serving", "keyless"):
            if phase == "serving":
                door.open()
            headers = {} if phase == "keyless" else {"authorization": "Bearer k"}
            answer = await door.ask(origin="https://page.example", **headers)
            assert answer.status_code == {"loading": 503, "serving": 200, "keyless": 401}[phase]
            # Without this header a page could not even read the error.
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
        allowed = await preflight("https://page.example")  # browsers send no key with it
        assert allowed.status_code == 200
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert (await preflight("https://other.example")).status_code == 400
        other = await door.ask(origin="https://other.example", authorization="Bearer k")
        assert "access-control-allow-origin" not in other.headers

    at(use, ServerSettings(allowed_origins=["https://page.example"], api_key="k"))


def test_credentials_of_every_page_are_refused() -> None:
    with pytest.raises(ValueError, match="name the origins"):
        ServerSettings(allowed_origins=["*"], allow_credentials=True)


# -- TLS ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of a certificate, its key, another key, and of the authority."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    own, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    parts = {
        "cert": b"".join(blob.bytes() for blob in own.cert_chain_pems),
        "key": own.private_key_pem.bytes(),
        "other": other.private_key_pem.bytes(),
        "both": own.private_key_and_cert_chain_pem.bytes(),
        "authority": authority.cert_pem.bytes(),
        "garbage": b"no certificate\n",
    }
    for name, data in parts.items():
        (folder / name).write_bytes(data)
    return {name: str(folder / name) for name in parts}


def test_tls_settings_that_hold(pem: dict[str, str]) -> None:
    assert uvicorn_settings(ServerSettings()) == {}
    assert not ServerSettings().secure
    one_file = ServerSettings(ssl_certfile=pem["both"])
    assert one_file.secure
    assert uvicorn_settings(one_file)["ssl_keyfile"] is None
    mutual = ServerSettings(
        ssl_certfile=pem["cert"], ssl_keyfile=pem["key"], ssl_ca_certs=pem["authority"], ssl_cert_reqs=2
    )
    assert uvicorn_settings(mutual)["ssl_cert_reqs"] is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ssl_keyfile": "key"}, "--ssl-keyfile is for TLS.*--ssl-certfile"),
        ({"ssl_ca_certs": "authority"}, "--ssl-ca-certs is for TLS"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "other"}, "KEY_VALUES_MISMATCH"),
        ({"ssl_certfile": "cert"}, "must hold the key too"),
        ({"ssl_certfile": "garbage", "ssl_keyfile": "key"}, "--ssl-certfile .*garbage"),
        ({"ssl_certfile": "both", "ssl_ca_certs": "garbage"}, "--ssl-ca-certs .*garbage"),
        ({"ssl_certfile": "both", "ssl_cert_reqs": 2}, "--ssl-ca-certs says whose"),
        ({"ssl_certfile": "missing"}, "--ssl-certfile .*missing: there is no such file"),
    ],
)
def test_tls_settings_that_cannot_hold(pem: dict[str, str], asked: dict[str, Any], words: str) -> None:
    files = {"missing": str(Path(pem["cert"]).with_name("missing")), **pem}
    given = {name: files.get(value, value) for name, value in asked.items()}
    with pytest.raises(ValueError, match=words):
        uvicorn_settings(ServerSettings(**given))


def test_tls_asks_for_no_password(pem: dict[str, str], tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(pem["key"]).read_bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = tmp_path / "locked"
    locked.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))
    with pytest.raises(ValueError, match="the key is encrypted"):
        uvicorn_settings(ServerSettings(ssl_certfile=pem["cert"], ssl_keyfile=str(locked)))


def test_cert_reqs_are_python_s() -> None:
    with pytest.raises(ValueError, match="--ssl-cert-reqs 3"):
        ServerSettings(ssl_cert_reqs=3)


# -- flags -------------------------------------------------------------------------------------------


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import plait.server.run
    from plait import cli

    seen: list[ServerSettings] = []

    async def note(args: Any, settings: ServerSettings, **_: Any) -> None:
        seen.append(settings)

    monkeypatch.setattr(plait.server.run, "serve", note)

    def settings_of(*flags: str) -> ServerSettings:
        monkeypatch.setattr("sys.argv", ["plait", "serve", "m", *flags])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return seen.pop()

    assert settings_of() == ServerSettings(allowed_origins=[], allowed_methods=["*"], allowed_headers=["*"])
    given = settings_of(
        "--api-key", "one", "--api-key", "two", "--allowed-origins", '["https://a", "https://b"]',
        "--allowed_methods", "GET", "--allowed-methods", "POST", "--log-format=json",
        "--disable-uvicorn-access-log", "--disable-log-stats", "--enable-log-requests", "--max-log-len", "9",
        "--api-server-count", "2", "--otlp-traces-endpoint", "http://c:4318",
    )  # fmt: skip
    assert given.api_keys == ("one", "two")
    assert given.allowed_origins == ["https://a", "https://b"]
    assert given.allowed_methods == ["GET", "POST"]
    assert given.logs == LogSettings("info", "json")
    assert given.disable_access_log
    assert given.disable_log_stats
    assert given.enable_log_requests
    assert (given.max_log_len, given.api_server_count) == (9, 2)
    assert given.traces_endpoint == "http://c:4318/v1/traces"
    assert take_foreign(["generate", "m", "--disable-log-stats"])[0] == ["generate", "m"]
    monkeypatch.setenv("VLLM_API_KEY", "three four")
    assert settings_of().api_keys == ("three", "four")
    monkeypatch.setenv("PLAIT_API_KEY", "five")
    assert settings_of().api_keys == ("five",)


# -- metrics -----------------------------------------------------------------------------------------


def test_the_page_names_every_metric() -> None:
    page = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    table = page.partition("## Metrics")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    named = {name: kind.strip() for names, kind in rows for name in re.findall(r"`([^`]+)`", names)}

    async def use(door: Door) -> str:
        door.open()
        await door.ask()
        return (await door.client.get("/metrics")).text

    served = dict(re.findall(r"^# TYPE (\S+) (\S+)$", at(use), re.MULTILINE))
    assert named == served


def test_times_of_requests() -> None:
    async def use(door: Door) -> str:
        door.open()
        await door.ask()
        await door.ask({"n": 2, "stream": True})
        await door.ask({"n": 0})
        door.engine.dead.set()
        await door.ask()
        return (await door.client.get("/metrics")).text

    samples = dict(re.findall(r'^vllm:(\w+){model_name="tiny"} (\S+)$', at(use), re.MULTILINE))
    figures = {name: float(value) for name, value in samples.items()}
    prompt = len("<user>hello<assistant>")
    assert figures["request_prompt_tokens_sum"] == 2 * prompt
    assert figures["request_generation_tokens_sum"] == 4 + 8
    assert figures["request_params_n_sum"] == 1 + 2
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token"):
        assert figures[f"request_{name}_seconds_count"] == 2, name
    assert figures["request_queue_time_seconds_sum"] == 2 * 0.25
