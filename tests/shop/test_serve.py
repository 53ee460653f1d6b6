"""The web page's server: visits over HTTP, and what it refuses."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from signal import SIG_DFL, SIGINT, SIGTERM, Signals, signal

import pytest

from megagent.errors import MegagentError
from megagent.shop import serve
from megagent.shop.serve import LARGEST_BODY, LOOPBACK, WebServer
from megagent.shop.sites import ShopSite
from megagent.shop.visit import LONGEST_ACTION, OpenShop, ShopOptions
from tests.shop.visitors import PATIENCE_S, Client, serving, way_to_win

MOST_VISITS = 4


@pytest.fixture(scope="module")
def client(shop: OpenShop) -> Iterator[Client]:
    with serving(ShopSite(shop, most_visits=MOST_VISITS)) as client:
        yield client


def test_buying_what_was_asked_scores_1_and_every_component_is_explained(shop: OpenShop, client: Client) -> None:
    visit = client.post("api/visits", {"task": 5})
    for action in way_to_win(shop, 5):
        assert visit["outcome"] is None
        visit = client.post(f"api/visits/{visit['visit']}/actions", {"action": action})
    outcome = visit["outcome"]
    assert (outcome["score"], outcome["won"]) == (1.0, True)
    assert sum(part["share"] or 0.0 for part in outcome["parts"]) == pytest.approx(1.0)
    assert all(part["sentence"] for part in outcome["parts"])


def test_the_page_shows_what_the_agent_reads(shop: OpenShop, client: Client) -> None:
    name = client.post("api/visits", {"task": 0})["visit"]
    shown = client.post(f"api/visits/{name}/actions", {"action": "search[soft shirt]"})
    visit = shop.visit(0)
    visit.act("search[soft shirt]")
    assert shown["observation"] == visit.observation.page
    assert shown["admissible"] == list(visit.observation.admissible)
    assert shown["task"] == visit.observation.task


def test_visits_do_not_know_of_each_other(client: Client) -> None:
    one, other = (client.post("api/visits", {"task": 3})["visit"] for _ in range(2))
    client.post(f"api/visits/{one}/actions", {"action": "search[shirt]"})
    assert client.get(f"api/visits/{one}")["page"]["kind"] == "results"
    assert client.get(f"api/visits/{other}")["page"]["kind"] == "search"


def test_the_visit_unused_for_longest_gives_way(client: Client) -> None:
    names = [client.post("api/visits", {})["visit"] for _ in range(MOST_VISITS)]
    client.get(f"api/visits/{names[0]}")
    client.post("api/visits", {})
    assert client.get(f"api/visits/{names[0]}")["steps"] == 0
    assert client.refusal(client.get, f"api/visits/{names[1]}")[0] == 404


def test_after_the_purchase_nothing_more_is_done(shop: OpenShop, client: Client) -> None:
    name = client.post("api/visits", {"task": 1})["visit"]
    for action in way_to_win(shop, 1):
        client.post(f"api/visits/{name}/actions", {"action": action})
    status, reason = client.refusal(client.post, f"api/visits/{name}/actions", {"action": "search[x]"})
    assert (status, reason) == (409, "this visit has ended with a purchase; start a new one")


def test_an_action_that_the_page_does_not_offer_is_marked(client: Client) -> None:
    name = client.post("api/visits", {})["visit"]
    shown = client.post(f"api/visits/{name}/actions", {"action": "click[buy now]"})
    assert shown["moves"] == [{"action": "click[buy now]", "admissible": False}]
    assert shown["page"]["kind"] == "search"


@pytest.mark.parametrize("path", ["shop.html", "api", "api/", "api/visits/none", "..%2f..%2fetc/passwd", "shop.js/"])
def test_unknown_paths_are_refused(client: Client, path: str) -> None:
    assert client.refusal(client.get, path)[0] == 404


@pytest.mark.parametrize("name", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_host_header_that_names_another_machine_is_refused(client: Client, name: str) -> None:
    assert client.refusal(client.get, "", {"Host": name})[0] == 421


@pytest.mark.parametrize("name", ["localhost:9000", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_a_host_header_of_this_machine_is_served(client: Client, name: str) -> None:
    """Also with another port: the page may be reached through a tunnel."""
    assert "<!doctype html>" in client.get("", {"Host": name})


def test_a_page_of_another_origin_cannot_act(client: Client) -> None:
    headers = {"Origin": "http://evil.example"}
    assert client.refusal(client.post, "api/visits", {}, headers)[0] == 403


def test_a_malformed_origin_is_refused(client: Client) -> None:
    assert client.refusal(client.post, "api/visits", {}, {"Origin": "http://[x"})[0] == 400


def test_a_form_of_another_page_cannot_act(client: Client) -> None:
    headers = {"Content-Type": "text/plain"}
    assert client.refusal(client.post, "api/visits", {}, headers)[0] == 415


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 9000,
        b"\xff",
        {"task": "1"},
        {"task": True},
        {"task": None},
        {"task": -1},
        {"task": 10**9},
        {"a": 1},
    ],
)
def test_a_body_that_is_not_a_request_is_refused(client: Client, body: object) -> None:
    assert client.refusal(client.post, "api/visits", body)[0] == 400


def test_a_large_body_is_refused_unread(client: Client) -> None:
    assert client.refusal(client.post, "api/visits", b" " * (LARGEST_BODY + 1))[0] == 413


def test_a_long_action_is_refused(client: Client) -> None:
    name = client.post("api/visits", {})["visit"]
    action = f"search[{'x' * LONGEST_ACTION}]"
    assert client.refusal(client.post, f"api/visits/{name}/actions", {"action": action})[0] == 409


@pytest.mark.parametrize("length", [None, "-1", "x"])
def test_a_body_without_a_length_is_refused(client: Client, length: str | None) -> None:
    connection = http.client.HTTPConnection(client.address.split("/")[2], timeout=PATIENCE_S)
    connection.putrequest("POST", "/api/visits")
    connection.putheader("Content-Type", "application/json")
    if length is not None:
        connection.putheader("Content-Length", length)
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()


def test_no_other_script_runs_in_the_page(client: Client) -> None:
    with urllib.request.urlopen(client.address, timeout=PATIENCE_S) as answer:
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "<script>" not in answer.read().decode()


def test_the_script_makes_text_of_everything() -> None:
    script = serve._asset("shop.js").decode()
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "setTimeout("):
        assert way not in script


def test_a_port_in_use_is_one_sentence(shop: OpenShop) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MegagentError, match=rf"--port {port}: another program listens there; [^\n]*\.$"):
            serve.serve_shop(ShopOptions(), LOOPBACK, port)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), (LOOPBACK, 99999)])
def test_an_address_that_is_not_ours_is_one_sentence(host: str, port: int) -> None:
    with pytest.raises(MegagentError, match=r"^--(host|port) [^\n]*$"):
        WebServer(host, port)


def test_another_host_than_loopback_is_warned_of(shop: OpenShop, capsys: pytest.CaptureFixture[str]) -> None:
    with WebServer("0.0.0.0", 0) as server:
        server.serve_forever = interrupted  # type: ignore[method-assign]
        server.serve(ShopSite(shop), "Shop at")
    printed = capsys.readouterr()
    assert "warning: --host 0.0.0.0 lets everybody" in printed.err
    assert printed.out.endswith("Closed.\n")


def interrupted(poll_interval: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("ending", [SIGINT, SIGTERM])
def test_the_command_prints_its_address_and_ends_politely(ending: Signals) -> None:
    command = [sys.executable, "-m", "megagent", "shop", "serve", "--port", "0", "--task", "7"]
    # Of a test run in the background an interrupt is ignored, and by its children too.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal(SIGINT, SIG_DFL)
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
            assert Client(address).post("api/visits", {})["number"] == 7
            process.send_signal(ending)
            rest, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "\nClosed.\n")
