"""``cospec cluster up``: starts everything that a file declares, and keeps the cluster until a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from cospec.cluster import ray_cluster, state_file
from cospec.cluster.config import ClusterConfig, Placement
from cospec.cluster.ray_cluster import LOOK_SECONDS, RayHead, RayHeadLost, RayHeadWatch
from cospec.errors import InvalidInput, words

SIGNALS = (signal.SIGTERM, signal.SIGINT)
START_LOOK_SECONDS = 0.2  # between two looks at a cluster that starts
QUIET_SECONDS = 10.0  # of a start, before a sentence names what is missing
STARTING, RUNNING, FAILED = "DEPLOYING", "RUNNING", "DEPLOY_FAILED"  # states of an application of Ray Serve


def up(config: ClusterConfig, address: str | None, say: Callable[[str], None]) -> None:
    """Serve until a signal.

    Args:
        address: of a Ray cluster that runs; None starts Ray on this machine.
        say: called with a sentence: what a start waits for, and the server's URL when the cluster is ready.

    Raises:
        RayHeadLost: Ray's head has ended.
        InvalidInput: a cluster of that name runs already, the port is in use, Ray Serve runs at ``address``, or the
            deployments cannot be started.
    """
    _check_name(config.name)
    port = free_port(config.server.host, config.server.port)
    cluster: AbstractContextManager[RayHead] = (
        ray_cluster.start(config.name, config.machine) if address is None else ray_cluster.join(config.name, address)
    )
    with cluster as head, _stop_event() as stopped:
        if address is not None:
            _check_serve(address)
        url = f"http://{config.server.host}:{port}"
        token = os.environ.get("RAY_AUTH_TOKEN_PATH", "") if address is None else ""
        state_file.write(state_file.RunningCluster(config.name, os.getpid(), head.address, url, token))
        watch = RayHeadWatch(head.address, config.health.head)
        try:
            with deployed(config, port, lasting=address is not None):
                if _await_start(config, stopped, watch, say):
                    say(f"cospec cluster {config.name} serves at {url}")
                    _keep(config.name, stopped, watch, head)
        finally:
            state_file.remove(config.name)


@contextmanager
def deployed(config: ClusterConfig, port: int, lasting: bool) -> Iterator[None]:
    """Hand the application of ``config`` to the connected Ray cluster, for the time of the block.

    Args:
        lasting: Ray outlives this process. Otherwise the end of Ray ends a start that has not finished: Ray Serve
            would wait ``health.grace`` for actors that never ran.

    Raises:
        InvalidInput: Ray Serve does not start.
    """
    from ray import serve

    answers = True
    try:
        _deploy(config, port)
        yield
    except RayHeadLost:  # Ray's processes end with this process
        answers = False
        raise
    finally:
        if answers and (lasting or ((found := _overview(config.name)) is not None and found.status.value != STARTING)):
            serve.shutdown()


def _deploy(config: ClusterConfig, port: int) -> None:
    """Start Ray Serve and the deployments, and do not wait for the deployments."""
    from ray import serve
    from ray.exceptions import RayError

    from cospec.cluster.application import LOGGING, application

    http = {"host": config.server.host, "port": port, "request_timeout_s": config.server.request_timeout}
    try:
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=LOGGING)
        serve.run_many(
            [serve.RunTarget(application(config), name=config.name)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    except (RayError, TimeoutError, RuntimeError) as error:
        raise _not_started(str(error)) from error


def _await_start(
    config: ClusterConfig, stopped: threading.Event, watch: RayHeadWatch, say: Callable[[str], None]
) -> bool:
    """Whether the deployments run; not after a signal. Says what a long start waits for.

    Ray Serve has a wait of its own, which no signal ends. In a thread, that wait would ask Ray after this process has
    left Ray, and Ray would end the process with status 1.

    Raises:
        RayHeadLost: Ray's head has ended.
        InvalidInput: the deployments cannot be started; the sentence is Ray Serve's.
    """
    quiet_until, look, said = time.monotonic() + QUIET_SECONDS, START_LOOK_SECONDS, ""
    while True:
        found = _overview(config.name)
        if found is not None and found.status.value == RUNNING:
            return True
        if found is not None and found.status.value == FAILED:
            # The application's message has the names of the deployments alone, a deployment's message the error.
            failed = (each.message for each in found.deployments.values() if each.status.value == FAILED)
            raise _not_started(next(failed, found.message))
        if stopped.wait(look):
            return False
        watch.check(look)
        if found is None or time.monotonic() < quiet_until:
            continue
        look, missing = LOOK_SECONDS, _missing(config, found.deployments)
        if missing not in ("", said):
            said = missing
            say(f"cospec cluster {config.name} waits for {missing}; cospec cluster status shows the machines")


def _keep(name: str, stopped: threading.Event, watch: RayHeadWatch, head: RayHead) -> None:
    """Watch the head until a signal, and have the API server count its restarts.

    Raises:
        RayHeadLost: Ray's head has ended.
    """
    from ray import serve

    api, counted = serve.get_app_handle(name), 0
    while not stopped.wait(LOOK_SECONDS):
        watch.check(LOOK_SECONDS)
        if head.restarts > counted:
            counted = head.restarts
            api.note_head_restarts.remote(counted)  # the handle keeps the call until an API server runs


def _not_started(message: str) -> InvalidInput:
    """The error of a cluster that does not start; the last line of Ray Serve's ``message`` names the reason."""
    reason = (message.strip() or "Ray Serve gives no reason").splitlines()[-1].removeprefix("cospec.errors.")
    return InvalidInput("the cluster", words(f"not started ({reason.rstrip('.')})"), "a configuration that starts")


def _overview(name: str) -> Any:
    """What Ray Serve says of an application; None where Ray Serve has no answer now."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        return serve.status().applications.get(name)
    except RayError:
        return None


def _missing(config: ClusterConfig, deployments: Mapping[str, Any]) -> str:
    """Deployments that do not run yet, each with the placement that its actors need."""
    from cospec.cluster.application import DRAFTERS, TARGET

    places: dict[str, list[Placement]] = {DRAFTERS.format(name=each.name): [each.placement] for each in config.drafters}
    places[TARGET] = [config.target.placement]
    if config.target.stages is not None:
        places[TARGET].append(config.target.stages.placement)
    waiting = [name for name in sorted(places) if name in deployments and deployments[name].status.value != "HEALTHY"]
    return ", ".join(f"{name} ({' and '.join(map(_needs, places[name]))})" for name in waiting)


def _needs(placement: Placement) -> str:
    return json.dumps({key: value for key, value in placement.model_dump().items() if value})


def status(name: str) -> dict[str, Any]:
    """Deployments, machines and their resources of a running cluster, as plain values."""
    found = state_file.read(name)
    with ray_cluster.join(name, found.address, found.token_path):
        import ray
        from ray import serve

        applications = serve.status().applications
        return {
            "name": name,
            "url": found.url,
            "ray": found.address,
            "deployments": {
                deployment: {"status": str(each.status.value), "replicas": each.replica_states, "message": each.message}
                for deployment, each in (applications[name].deployments if name in applications else {}).items()
            },
            "machines": [
                {"address": node["NodeManagerAddress"], "alive": node["Alive"], "resources": _plain(node["Resources"])}
                for node in ray.nodes()
            ],
        }


def down(name: str, timeout: float = 120.0) -> None:
    """End a running cluster and wait for the end.

    Raises:
        InvalidInput: no cluster of that name runs, or the process does not end in time.
    """
    found = state_file.read(name)
    os.kill(found.pid, signal.SIGTERM)
    ended = threading.Event()
    for _ in range(int(timeout / 0.1)):
        if not found.alive:
            return
        ended.wait(0.1)
    raise InvalidInput(
        "name", words(f"{name}, whose process {found.pid} runs after {timeout:g} s"), "a cluster that ends"
    )


def free_port(host: str, port: int) -> int:
    """Check that a port is free; port 0 takes a free port.

    Raises:
        InvalidInput: the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise InvalidInput("server.port", words(f"{host}:{port} ({error.strerror})"), "a free port") from None
        found: int = listener.getsockname()[1]
        return found


def _check_name(name: str) -> None:
    try:
        running = state_file.read(name)
    except InvalidInput:
        return
    raise InvalidInput("name", words(f"{name}, which runs as process {running.pid}"), "the name of no running cluster")


def _check_serve(address: str) -> None:
    """Refuse a Ray cluster with Ray Serve, whose port is chosen, and whose applications would end with this cluster."""
    from ray import serve

    found = serve.status()
    if found.proxies or found.applications:
        allowed = "a Ray cluster without Ray Serve; serve shutdown ends Ray Serve"
        raise InvalidInput("address", words(f"{address}, where Ray Serve runs"), allowed)


def _plain(resources: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in resources.items() if not key.startswith("node:")}


@contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """An event that a signal sets."""
    stopped = threading.Event()
    before = {each: signal.signal(each, lambda *_: stopped.set()) for each in SIGNALS}
    try:
        yield stopped
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
