"""Run a cluster on one machine, or join as a worker or gateway."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants, services
from ray._private.authentication import authentication_token_setup
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.schema import ApplicationStatus, ServeStatus

from vlmserve.cores import usable_cores
from vlmserve.engine.preload import Preloader
from vlmserve.errors import ConfigurationError, ModelLoadError
from vlmserve.logs import level_number, set_up_logging
from vlmserve.scaleout.member_messages import GatewayLaunch, HostLaunch, ModelLaunch, WorkerLaunch
from vlmserve.scaleout.ondemand.catalogue import Listed
from vlmserve.scaleout.ray import head
from vlmserve.scaleout.ray.deployments import gateway_application, own_server, worker_application, worker_launch
from vlmserve.scaleout.ray.directory import NAMESPACE
from vlmserve.scaleout.ray.membership import Membership
from vlmserve.scaleout.settings import GatewayConfig, ModelsConfig, WorkerKind
from vlmserve.scaleout.storage import check_local, check_shared, refuse_local
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

logger = logging.getLogger(__name__)

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_METRICS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # else all other processes run before the engines
    "RAY_task_events_report_interval_ms": "0",  # else Ray's head remembers the latest 100,000 calls
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",  # else Ray ends all members a minute after its head
}
_OBJECT_STORE = 100 * 1024**2
"""Bytes; requests do not use the object store."""
_EXTRA_GRACE = 10.0
_LOOK = 0.2
"""Seconds between checks of started processes."""
_PATIENCE = 5.0
"""Seconds that the gateway gets for an answer."""
_GATEWAY, _RUNNING = "gateway", "RUNNING"
_LOOPBACK = ("127.0.0.1", "localhost")


def up(kinds: Sequence[WorkerKind], server: ServerConfig, gateway: GatewayConfig) -> None:
    """Run until SIGINT or SIGTERM. server: the gateway's settings.

    Raises ConfigurationError if the port is taken, ModelLoadError if a model cannot be loaded.
    """
    set_up_logging(server.log_format, "cluster", level_number(server.log_level))
    check_local([kind.server for kind in kinds for _ in range(kind.count)])
    check_port(server)
    show("Starting Ray")
    cores, workers = usable_cores(), sum(kind.count for kind in kinds)
    kinds = [kind.ready(max(1, cores // workers)) for kind in kinds]
    models = ", ".join(dict.fromkeys(kind.engine.model for kind in kinds))
    grace = server.shutdown_grace + _EXTRA_GRACE
    with _stopped() as stopped, _preloader(kinds) as preloader, _local_ray(cores), _serve(grace):
        # Ray must not reserve cores: the engines share them by their threads.
        targets = [
            serve.RunTarget(
                worker_application(
                    kind.name, kind.engine, kind.media, kind.server, count=kind.count,
                    resources={"num_cpus": 0.01, **({"num_gpus": kind.gpus} if kind.gpus else {})},
                    preloader=preloader,
                ),
                name=f"workers {kind.name}",
                route_prefix=None,
            )
            for kind in kinds
        ]  # fmt: skip
        front = gateway_application(server, gateway, resources={"num_cpus": 0.01}, preloader=preloader)
        targets.append(serve.RunTarget(front, name="gateway", route_prefix=None))
        # The gateway starts with the workers, which register once they are up.
        *_, handle = serve.run_many(targets, wait_for_applications_running=False)
        if wait_until_running(stopped, workers):
            url = handle.remote().result()
            wait_until_ready(url, stopped)
            print(f"vlmserve is ready: {url} ({workers} workers with {models})", flush=True)
            _wait_for_stop(stopped)


def join_as_worker(engine: EngineConfig, media: MediaConfig, server: ServerConfig, *, name: str, address: str) -> None:
    """Run until SIGINT or SIGTERM. Raises VLMServeError."""
    server = check_shared(server)
    settings = engine.model_dump_json(), media.model_dump_json(), server.model_dump_json()
    name = name or f"{socket.gethostname()}-{os.getpid()}"

    def launch(token: str, _: str) -> WorkerLaunch:
        return worker_launch(name, token, *settings)

    with _stopped() as stopped, _joined(address), Membership("worker", launch) as member:
        print(f"vlmserve worker {name} is ready: {member.url} ({engine.model})", flush=True)
        _wait(member, stopped, server.shutdown_grace)


def join_as_host(
    listed: Sequence[Listed], models: ModelsConfig, server: ServerConfig, *, name: str, address: str
) -> None:
    """Offer models that load on demand, until SIGINT or SIGTERM. Raises VLMServeError."""
    name = name or f"{socket.gethostname()}-{os.getpid()}"

    def launch(token: str, _: str) -> HostLaunch:
        return HostLaunch(
            name,
            token,
            [
                ModelLaunch(
                    one.name, one.engine.model_dump_json(), one.media.model_dump_json(),
                    own_server(check_shared(one.server)).model_dump_json(),
                )
                for one in listed
            ],
            own_server(server).model_dump_json(),
            models.model_dump_json(),
        )  # fmt: skip

    with _stopped() as stopped, _joined(address), Membership("worker", launch) as member:
        names = ", ".join(one.name for one in listed)
        print(f"vlmserve worker {name} is ready: {member.url}; models load on demand: {names}", flush=True)
        _wait(member, stopped, server.shutdown_grace)


def join_as_gateway(server: ServerConfig, gateway: GatewayConfig, *, address: str, takes_over: bool = False) -> None:
    """Run until SIGINT, SIGTERM or a takeover. takes_over: replace the gateway at this port. Raises VLMServeError."""
    refuse_local(server)
    if not takes_over:
        check_port(server)

    def launch(token: str, _: str) -> GatewayLaunch:
        return GatewayLaunch(token, server.model_dump_json(), gateway.model_dump_json(), takes_over)

    with _stopped() as stopped, _joined(address), Membership("gateway", launch) as member:
        print(f"vlmserve gateway is ready: {member.url}", flush=True)
        _wait(member, stopped, server.shutdown_grace)


def check_port(server: ServerConfig) -> None:
    """Raises ConfigurationError if the address is taken."""
    from vlmserve.server.run import bind

    bind(server).close()


def _wait_for_stop(stopped: threading.Event) -> None:
    while not stopped.wait(_LOOK):
        if head.has_ended():
            logger.error("Ray's head ended: requests go on, but workers that end are not replaced; restart the cluster")
            stopped.wait()
            return


def _wait(member: Membership, stopped: threading.Event, grace: float) -> None:
    while not stopped.wait(_LOOK):
        if member.was_replaced:
            print(f"another gateway has taken over {member.url}", flush=True)
            return
        if not member.is_alive:
            raise ConfigurationError(f"the process at {member.url} has ended; its log says why")
    member.drain(grace + _EXTRA_GRACE)


@contextlib.contextmanager
def _stopped() -> Iterator[threading.Event]:
    """SIGINT or SIGTERM sets the event; the second signal ends the process."""
    event = threading.Event()

    def stop(*_: object) -> None:
        if event.is_set():
            os._exit(1)
        event.set()

    before: dict[int, Callable[..., object] | int | None] = {
        number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _preloader(kinds: Iterable[WorkerKind]) -> Iterator[str]:
    """Yield the address of a process that imports the libraries while Ray starts, and forks all members.

    Ray tells a replica its GPUs by its environment, which forks do not have: with GPUs, yield an empty address.
    """
    if sys.platform != "linux" or any(kind.gpus for kind in kinds):
        yield ""
        return
    with contextlib.closing(Preloader()) as preloader:
        yield preloader.address


@contextlib.contextmanager
def _local_ray(cores: int) -> Iterator[None]:
    """Only this machine reaches it."""
    os.environ.update({name: value for name, value in _SETTINGS.items() if name not in os.environ})
    _keep_to_loopback()
    logging.getLogger(authentication_token_setup.__name__).addFilter(_concerns_users)
    _start_ray(
        address="local", num_cpus=max(2, cores), include_dashboard=False, object_store_memory=_OBJECT_STORE,
        log_to_driver=False,
    )  # fmt: skip
    head.log_messages()
    logging.getLogger(SERVE_LOGGER_NAME).setLevel(logging.WARNING)
    show(f"Ray runs; logs of Ray, workers and gateway: {head.log_folder()}")
    try:
        yield
    finally:
        left = head.family() if head.has_ended() else []  # Ray's agents wait for their head
        ray.shutdown()
        head.kill(left)


def _start_ray(**options: Any) -> None:
    """Ray exits at SIGTERM. Keep the handler that lets requests finish."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(namespace=NAMESPACE, logging_level="WARNING", **options)
    finally:
        signal.signal(signal.SIGTERM, handler)


def _concerns_users(record: logging.LogRecord) -> bool:
    """False for Ray's remark that its default asks for tokens."""
    return "authentication is enabled" not in record.getMessage()


def _keep_to_loopback() -> None:
    """Have Ray listen only at 127.0.0.1. Its default is the machine's address, or all."""
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _is_on_loopback(address: str) -> bool:
    """True for a Ray that only this machine reaches."""
    found = services.find_gcs_addresses() if address == "auto" else {address}
    places = [one.rpartition(":") for one in found]
    if not places or not all(host in _LOOPBACK and port.isdecimal() for host, _, port in places):
        return False
    own = ray.util.get_node_ip_address()
    return not any(_answers(own, int(port)) for _, _, port in places)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    os.environ.update({name: value for name, value in _SETTINGS.items() if name not in os.environ})
    if _is_on_loopback(address):
        _keep_to_loopback()
    try:
        _start_ray(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"there is no Ray to join at {address}: {reason}. Start one with: ray start --head, and on other machines "
            "ray start --address HOST:6379"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _serve(grace: float) -> Iterator[None]:
    """Run without an HTTP server. Requests get `grace` seconds to finish."""
    serve.start(proxy_location="Disabled")
    try:
        yield
    finally:
        if head.has_ended():
            head.drain_members(grace)
        else:
            serve.shutdown()


_began = time.monotonic()


def show(step: str) -> None:
    print(f"{time.monotonic() - _began:5.1f} s  {step}", file=sys.stderr, flush=True)


def wait_until_running(stopped: threading.Event, workers: int) -> bool:
    """Show how many workers run until all of them and the gateway do. Returns False if `stopped` is set earlier.

    Raises ModelLoadError if a worker or the gateway cannot start.
    """
    shown = -1
    while not stopped.wait(_LOOK):
        status = serve.status()
        _check(status)
        running = num_workers(status)
        if running != shown:
            show(f"{running} of {workers} workers loaded")
            shown = running
        if all(one.status == ApplicationStatus.RUNNING for one in status.applications.values()):
            return True
    return False


def wait_until_ready(url: str, stopped: threading.Event) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while not stopped.is_set():
        try:
            opener.open(f"{url}/ready", timeout=_PATIENCE).close()
            return
        except OSError:  # an error status, too
            stopped.wait(_LOOK)


def num_workers(status: ServeStatus) -> int:
    return sum(
        deployment.replica_states.get(_RUNNING, 0)
        for name, application in status.applications.items()
        if name != _GATEWAY
        for deployment in application.deployments.values()
    )


def _check(status: ServeStatus) -> None:
    for name, application in status.applications.items():
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            messages = [application.message, *(one.message for one in application.deployments.values())]
            raise ModelLoadError(f"{name} cannot start: {_reason(messages)}")


def _reason(messages: Iterable[str]) -> str:
    """The error in Serve's messages, which may end with a traceback."""
    last = "\n".join(messages).strip().splitlines()[-1]
    return re.sub(r"^[\w.]+: ", "", last)
