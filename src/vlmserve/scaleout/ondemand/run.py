"""Start and stop a server with models that load on demand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
from collections.abc import Callable, Sequence

from vlmserve.engine.preload import Preloader, fork_children_from
from vlmserve.garbage import freeze_loaded_objects
from vlmserve.logs import level_number, set_up_logging
from vlmserve.scaleout.launch import MemberProcess
from vlmserve.scaleout.member_messages import WorkerLaunch
from vlmserve.scaleout.ondemand.app import create_app
from vlmserve.scaleout.ondemand.catalogue import Listed, budget_of, check_names
from vlmserve.scaleout.ondemand.gateway import OnDemandGateway
from vlmserve.scaleout.ondemand.pool import Pool
from vlmserve.scaleout.ondemand.shelf import Shelf
from vlmserve.scaleout.proxy import forward
from vlmserve.scaleout.settings import ModelsConfig
from vlmserve.server.batches.rows import OWN_ENDPOINTS
from vlmserve.server.batches.runner import batches_running
from vlmserve.server.run import (
    bind,
    event_loop_factory,
    quiet_logs,
    raise_file_limit,
    stop_on_signals,
    warn_of_strangers,
)
from vlmserve.server.web import WebServer
from vlmserve.settings.config import ServerConfig

logger = logging.getLogger(__name__)


def serve(listed: Sequence[Listed], config: ModelsConfig, server: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish; a second signal ends everything.

    Raises ConfigurationError for two models of one name, a taken address, or a GPU without a budget.
    """
    set_up_logging(server.log_format, level=level_number(server.log_level))
    quiet_logs(server)
    check_names(listed)
    raise_file_limit()
    budget = budget_of(listed, config)
    listener = bind(server)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        if sys.platform == "linux":
            preloader = Preloader()
            stack.callback(preloader.close)
            fork_children_from(preloader.address)
        token = secrets.token_hex(16)
        gateway = OnDemandGateway(server, token)
        warn_of_strangers(gateway)
        web = WebServer(create_app(gateway), server, listener)
        freeze_loaded_objects()
        shelf = Shelf(budget, config.models_patience)
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(run(gateway, web, listed, shelf, token, load_timeout=config.models_load_timeout))


async def run(
    gateway: OnDemandGateway,
    web: WebServer,
    listed: Sequence[Listed],
    shelf: Shelf,
    token: str,
    start: Callable[[WorkerLaunch], MemberProcess] = MemberProcess,
    *,
    load_timeout: float,
) -> None:
    pool = Pool(listed, shelf, start, gateway.set_workers, token, load_timeout=load_timeout)
    gateway.open(pool)
    stop = stop_on_signals(pool.kill)
    web.start()
    names = ", ".join(pool.models)
    print(f"vlmserve listens on {web.url}; models load when requests name them: {names}", flush=True)
    try:
        async with batches_running(gateway, dict.fromkeys(OWN_ENDPOINTS, forward)):
            await stop.wait()
        await gateway.drain(gateway.config.shutdown_grace)
        if gateway.num_in_flight:
            logger.warning("%d requests are not finished and fail now", gateway.num_in_flight)
    finally:
        await pool.close()
        await web.stop()
        await gateway.close()
