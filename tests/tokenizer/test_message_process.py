"""Tests of how the processes for grammars and templates of clients and admins begin and end."""

import os
import select
import signal
import subprocess
import sys

# Prints the id of the process that it has started, which is then waiting for a message.
_SERVER = """
import asyncio, marshal, time
from caraserve.tokenizer.message_process import MessageProcess

async def main():
    started = await MessageProcess.start("caraserve.tokenizer.template_process", marshal.dumps(({}, None)))
    print(started._process.pid, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def test_a_process_gets_no_signals_of_the_servers_terminal_and_ends_with_a_server_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            pid = int(server.stdout.readline())
            process = os.pidfd_open(pid)
            try:
                assert os.getsid(pid) == pid
            finally:
                server.send_signal(signal.SIGKILL)
            ended, _, _ = select.select([process], [], [], 10.0)
            os.close(process)
            assert ended
        finally:
            server.kill()
