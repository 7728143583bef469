"""The front end of a server: what requests pass before their engine sees them.

```
 clients ──► inbox ──► front end ──all that came, together──► mailbox ──► engine
                         └─ one at a time: HTTP, chat template, tokenizer
```
vLLM's is one event loop. It begins with each request that has come, and goes on with none of them
before it has begun with all. So requests that come while it is at work wait until it is done, are
prepared one after another, and reach the engine at once. That is how a thousand requests of the
same instant wait for each other (`docs/results/real-runs.md`).
"""

from __future__ import annotations

from kvsim.core.host import NEVER_NS, Receiver
from kvsim.machine.hardware import FrontEndTimes
from kvsim.run.replica.events import Clock, Process
from kvsim.run.replica.inbox import Inbox, Mailbox, Senders


def received(env: Clock, clients: Senders, times: FrontEndTimes | None) -> Receiver:
    """Where the requests of these clients reach the engine: behind a front end, if it has times."""
    inbox = Inbox(env, clients)
    if times is None:
        return inbox
    mailbox = Mailbox(env, env.peek, inbox.release)
    env.process(_prepare(env, inbox, times, mailbox))
    return mailbox


def _prepare(env: Clock, inbox: Inbox, times: FrontEndTimes, mailbox: Mailbox) -> Process:
    while True:
        inbox.collect(int(env.now))
        came = inbox.take()
        if not came:
            yield from inbox.wait(NEVER_NS)
            continue
        yield env.timeout(sum(times.request_ns(request.input_length) for request in came))
        for request in came:
            mailbox.put(request)
