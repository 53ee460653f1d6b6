"""A headless Chromium, spoken to in its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.shop.visitors import PATIENCE_S

LOOPBACK = "127.0.0.1"
COMMANDS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")


def install_browser() -> str:
    """The command of a Chromium, installed where that is possible; else skips and says why."""
    if found := next(filter(None, map(shutil.which, COMMANDS)), None):
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("there is no Chromium on PATH, and only root on a machine with apt-get can install it here")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        try:
            done = subprocess.run(
                ["apt-get", "-qq", *command], env=environment, capture_output=True, text=True, check=False, timeout=270
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"apt-get {command[0]} did not end within 270 s, so there is no Chromium")
        if done.returncode != 0:
            pytest.skip(f"apt-get {command[0]} failed, so there is no Chromium: {done.stderr.strip()[-200:]}")
    if found := next(filter(None, map(shutil.which, COMMANDS)), None):
        return found
    pytest.skip("the package chromium brought no command that is known here")


@dataclass
class Tab:
    """A tab of the browser, spoken to in its DevTools protocol."""

    socket: Any
    complaints: list[str] = field(default_factory=list)  # errors of scripts, refused loads, breaches of the policy
    _asked: int = 0

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        self.socket.send(json.dumps({"id": self._asked, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv(timeout=PATIENCE_S))
            if message.get("id") == self._asked:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def value(self, script: str) -> Any:
        """What an expression comes to in the page."""
        result = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.value(script):
            if time.monotonic() > deadline:
                raise AssertionError(f"{script}: not within {PATIENCE_S:.0f} s. The page: {self.text('body')}")
            time.sleep(0.05)

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)
        self.wait(f"location.href === {json.dumps(address)} && !!document.body && !!document.body.dataset.ready")

    def text(self, selector: str) -> str:
        """The text that a person sees there."""
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Clicks, and waits until what the click asked for is there."""
        self.value(f"document.querySelector({json.dumps(selector)}).click()")
        self.wait("!document.body.hasAttribute('aria-busy')")

    def act(self, action: str) -> None:
        """Does an action of the shop as a person does: types a query, or clicks the button that does it."""
        if action.startswith("search["):
            self.value(f"document.querySelector('#query').value = {json.dumps(action[len('search[') : -1])}")
            self.click("#search button")
        else:
            self.click(f"button[data-action={json.dumps(action)}]")

    def _note(self, message: dict[str, Any]) -> None:
        method, details = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(details["exceptionDetails"]))
        if method == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.complaints.append(details["entry"]["text"])


@dataclass(frozen=True)
class Browser:
    port: int

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        from websockets.sync.client import connect

        request = urllib.request.Request(f"http://{LOOPBACK}:{self.port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        with connect(address, max_size=None, open_timeout=PATIENCE_S, ping_timeout=None, proxy=None) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                tab.ask(f"{domain}.enable")
            yield tab


@contextmanager
def start_browser(folder: Path) -> Iterator[Browser]:
    """folder: for its profile and its log."""
    command = install_browser()
    options = ("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-default-browser-check")
    options += ("--disable-background-networking", "--disable-sync", "--remote-debugging-port=0", "--no-proxy-server")
    if os.geteuid() == 0:
        options += ("--no-sandbox",)  # with it root's Chromium does not start
    log = folder / "log.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [command, *options, f"--user-data-dir={folder / 'profile'}", "about:blank"], stdout=output, stderr=output
        )
    try:
        yield Browser(_debugging_port(folder / "profile" / "DevToolsActivePort", process, log))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _debugging_port(path: Path, process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text().count("\n")):
        if process.poll() is not None:
            pytest.skip(f"the browser does not start here: {log.read_text(errors='replace').strip()[-300:]}")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)
    return int(path.read_text().split("\n")[0])
