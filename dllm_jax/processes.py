"""Many processes, one run: joined at the start, alike, and ended together.

Every process writes into the key-value store of JAX's coordinator, which is process 0: at
the start what it runs (`agree`), and where it fails the cause, if nobody else has. Two
threads beside the run read there: `listen` ends this process with the first cause that any
process told, `look` tells of one that has gone without a word, such as one that was killed.
Both work while the run waits in a collective operation for one that will not come.

JAX's own answer to a lost process is to abort the others, which leaves no word of why and
no exit code to go by. `jax_enable_recoverability` turns it off for all but the end of the
coordinator, of which the abort is the news.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
import traceback

import jax
from jax._src import distributed  # the store has no public name

from dllm_jax import exits

HEARTBEAT_S = 20  # a process that is not heard of for so long is lost
JOIN_S = 300  # until the last process has started
# Until the slowest has read its files, which may be many images; one that is lost is told.
AGREE_S = 6 * 3600
PATIENCE_S = 25  # a broken connection is the effect of a cause that is told by then
SEE_S = 10.0  # until a network's file system shows what another process has written
FOREVER_S = 7 * 24 * 3600
# What the errors of JAX say where another process has gone, in small letters.
BROKEN = ("gloo", "nccl", "connection", "socket", "unavailable", "deadline", "barrier")

group = None  # the Group of this process, once it has joined one
ending_lock = threading.Lock()
abort_handlers = []  # what C calls


class Group:
    """The processes of a run, seen from one of them."""

    def __init__(self, client, coordinator: str, index: int, count: int):
        """client: of the coordinator's store. coordinator: its HOST:PORT."""
        self.client, self.coordinator = client, coordinator
        self.index, self.count = index, count
        self.hosts = {index: socket.gethostname()}
        self.where = lambda: ""  # what this process is doing: see `watch`
        self.rounds = 0  # of `shared`, which are the same in every process
        self.error_text = None  # the error by which this process ends
        self.conclusion = None  # (exit code, last line), once they are known

    def name(self, index: int) -> str:
        """Returns how people find a process."""
        return f"process {index} on {self.hosts.get(index, 'an unknown host')}"

    def shared(self, kind: str, text: str) -> dict[int, str]:
        """Returns each process's text, once all have said theirs."""
        self.rounds += 1
        kind = f"{kind}_{self.rounds}"
        self.client.key_value_set(f"{kind}/{self.index}", text)
        self.client.wait_at_barrier(f"{kind}_told", AGREE_S * 1000)
        texts = self.client.key_value_dir_get(f"{kind}/")
        return {int(key.rsplit("/", 1)[1]): text for key, text in texts}

    def enter(self) -> None:
        """Takes this process's number, and learns the hosts of the others.

        Where another has taken it, all end as where one is lost: launchers such as
        Kubernetes start a process again before it is missed. Raises ValueError where
        processes were told other numbers of them.
        """
        host = self.hosts[self.index]
        try:
            self.client.key_value_set(f"number/{self.index}", host)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            self.tell("cause", second(self.index, f"on {host}"))
            time.sleep(PATIENCE_S)  # `listen` ends this process meanwhile
            end(exits.STOPPED)
        self.hosts = self.shared("host", host)
        agree({"--processes": str(self.count)})

    # ---- Causes ----------------------------------------------------------------------

    def tell(
        self, kind: str, text: str, code: int = exits.STOPPED, error: str | None = None
    ) -> None:
        """Writes down what ends this process, if it is the first of its kind.

        error: of which nothing was printed; None: that by which this process ends, if any.
        """
        cause = {"text": text, "error": error or self.error_text, "code": code}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.client.key_value_set(kind, json.dumps(cause))

    def listen(self) -> None:
        """Waits for a cause, and ends this process with it."""
        while True:
            try:
                text = self.client.blocking_key_value_get("cause", FOREVER_S * 1000)
                break
            except jax.errors.JaxRuntimeError:
                if not self.reachable():
                    self.end_without_coordinator()
                time.sleep(1)
        deaf()
        cause = json.loads(text)
        code, line = cause["code"], f"error: {cause['text']}"
        self.conclusion = code, line
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.client.wait_at_barrier("cause_read", 2000)
        # The run may be about to say the same; and the store ends with process 0.
        time.sleep(1 if self.index else 2)
        if code != exits.STOPPED and cause["error"] == self.error_text:
            line = ""
        end(code, line)

    def look(self) -> None:
        """Tells of processes whose heart no longer beats, or whose number another took.

        That may be a program of somebody else's, which knows nothing of `enter`: the
        coordinator hears the first no more, and would call it lost as the second ends.
        """
        everyone, first = list(range(self.count)), {}
        while not self.conclusion:
            time.sleep(1)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                alive = self.client.get_live_nodes(everyone)  # {index: of which start}
                first = first or alive
                lost = [self.name(index) for index in everyone if index not in alive]
                again = [index for index in alive if alive[index] != first.get(index)]
                text = f"{' and '.join(lost)} is lost: not heard of for {HEARTBEAT_S} seconds"
                if not alive:  # process 0 counts by its wall clock, and itself, too
                    text = (
                        f"none was heard of for {HEARTBEAT_S} seconds by the clock of "
                        f"{self.name(0)}: it was set, or that host slept"
                    )
                if again:
                    text = second(again[0], f"beside {self.name(again[0])}")
                if (lost or again) and not self.conclusion:
                    self.tell("cause", text + self.where())

    # ---- The coordinator's end -------------------------------------------------------

    def reachable(self) -> bool:
        """Returns whether the coordinator takes connections."""
        host, port = self.coordinator.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), 2).close()
        except OSError:
            return False
        return True

    def answers(self) -> bool:
        """Returns whether the coordinator answers; one that is frozen takes connections."""
        told = []

        def ask():
            try:
                self.client.key_value_try_get("cause")
                told.append(True)
            except jax.errors.JaxRuntimeError as error:
                told.append("NOT_FOUND" in str(error))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(5)
        return told == [True]

    def end_without_coordinator(self) -> None:
        """Ends this process, as the coordinator is gone."""
        lost = f"error: {self.name(0)} is lost, the coordinator at {self.coordinator}"
        end(*(self.conclusion or (exits.STOPPED, lost + self.where())))

    def aborted(self) -> None:
        """Ends this process if it aborts for want of the coordinator, as JAX lets it."""
        if self.conclusion or not (self.reachable() and self.answers()):
            self.end_without_coordinator()

    # ---- The end ---------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Ends this process: with the others, or telling them why it cannot go on."""
        try:
            self.part(error)
        except exits.StoppedAtOnce as again:  # while it waited for the others
            self.part(again)

    def part(self, error: BaseException | None) -> None:
        """Does what `leave` does, but for a second signal meanwhile, which it raises."""
        if error is None:
            self.leave_together(0, "")
        if isinstance(error.__context__, exits.Stopped):  # which all agreed on
            for number in exits.received:
                name = signal.Signals(number).name
                self.tell("signal", f"stopped: {name} came to {self.name(self.index)}")
            self.leave_together(exits.STOPPED, "stopped by a signal")
        self.error_text, code = ending(error)
        if broken(error):
            time.sleep(PATIENCE_S)  # `listen` ends this process meanwhile
            code = exits.STOPPED
        elif not isinstance(error, SystemExit):
            traceback.print_exception(error)
        deaf()
        self.tell("cause", f"{self.name(self.index)} ended: {self.error_text}", code)
        time.sleep(10)  # as above
        end(code)

    def leave_together(self, code: int, line: str) -> None:
        """Ends this process once all others have come here, with the signal, if any."""
        self.client.wait_at_barrier("left", FOREVER_S * 1000)
        deaf()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            line = json.loads(self.client.key_value_try_get("signal"))["text"]
        self.conclusion = code, line
        if self.index == 0:
            time.sleep(1)  # the store ends with this process
        end(code, line)


# ---- In and out ----------------------------------------------------------------------


def join(
    coordinator: str | None, count: int | None, index: int | None, seconds: int = JOIN_S
) -> None:
    """Makes this process number `index` of `count`; from now on they end together.

    coordinator: HOST:PORT of process 0. What is None comes from JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or from what JAX finds out of SLURM, Open MPI,
    Kubernetes or Cloud TPU. seconds: what the others may take to come. If they do not,
    the process ends as one to be started again, since they may only be late. Raises
    ValueError where nothing says who is who, or not the same to all.
    """
    global group
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = number_of("JAX_NUM_PROCESSES") if count is None else count
    index = number_of("JAX_PROCESS_ID") if index is None else index
    named = re.fullmatch(r".+:(\d+)", coordinator or "")
    if coordinator and not (named and 0 < int(named[1]) < 2**16):
        raise ValueError(
            f"coordinator {coordinator!r}: it must be HOST:PORT of process 0"
        )
    connect(coordinator, count, index, seconds)
    state = distributed.global_state
    group = Group(
        state.client, state.coordinator_address, state.process_id, state.num_processes
    )
    at_abort(group.aborted)
    for act in (group.listen, group.look):
        threading.Thread(target=act, daemon=True).start()
    group.enter()


def connect(coordinator, count, index, seconds: int) -> None:
    """Lets JAX join processes; see `join`, which has completed what the environment says.

    Ends this process where the others do not come in time, or the coordinator cannot be.
    """
    state, reasons = distributed.global_state, []
    given = None not in (coordinator, count, index)

    def give_up():
        end(exits.STOPPED, nobody_came(state, seconds, *reasons[-1:]))

    def turned_away():  # JAX aborts
        end(exits.STOPPED, not_taken(state))

    if given and index == 0 and taken(coordinator):
        end(exits.STOPPED, no_way(coordinator, "another program has the port here"))
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM
    at_abort(turned_away)
    alarm = threading.Timer(seconds, give_up)
    alarm.daemon = True
    alarm.start()
    how = {
        "cluster_detection_method": "deactivate" if given else None,
        "heartbeat_timeout_seconds": HEARTBEAT_S,
        # JAX would tell of it by a stack trace: the alarm is to be earlier.
        "initialization_timeout": seconds + 60,
    }
    try:
        initialize((coordinator, count, index), how, reasons)
    except jax.errors.JaxRuntimeError as error:
        end(exits.STOPPED, no_way(state.coordinator_address, one_line(error)))
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise ValueError(
            f"--distributed: {one_line(error)} Give --coordinator=HOST:PORT of process "
            "0, --processes=N and --process=I"
        ) from None
    finally:
        alarm.cancel()


def initialize(given: tuple, how: dict, reasons: list[str]) -> None:
    """Lets JAX ask the launcher who is who, again while its answer may yet come, and join.

    Kubernetes knows the name of a pod only once that has a node: the pod of a host that
    failed may wait for one longer than JAX asks, and a refusal would end the whole Job.

    given, how: what jax.distributed.initialize takes. reasons: why it was asked again.
    """
    while True:
        try:
            jax.distributed.initialize(*given, **how)
            return
        except jax.errors.JaxRuntimeError:  # of the coordinator, who is known
            raise
        except Exception as error:  # each launcher's client has errors of its own
            if not passing(error):
                raise
            reasons.append(one_line([*causes(error)][-1]))
        time.sleep(1)


def passing(error: BaseException) -> bool:
    """Returns whether a launcher that does not say who is who may do so a moment later."""
    if str(error).startswith(("Retry failed", "Kubernetes API Error: 5")):  # JAX's
        return True
    network = socket.gaierror, ConnectionError, TimeoutError
    return any(isinstance(cause, network) for cause in causes(error))


def causes(error: BaseException | None):
    """Yields an error, what led to it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def taken(address: str) -> bool:
    """Returns whether a program listens at a port of this host: JAX may crash there."""
    port = int(address.rsplit(":", 1)[1])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def no_way(coordinator: str, reason: str) -> str:
    """Returns the last line of a process that cannot join for another reason than time."""
    return (
        f"error: no way to the coordinator, {coordinator}: {reason}; is it the address of "
        "process 0, and its port free?"
    )


def number_of(variable: str) -> int | None:
    """Returns a number of the environment; raises ValueError where it is none."""
    text = os.environ.get(variable)
    if text and not text.isdecimal():
        raise ValueError(f"{variable}={text}: a number is needed")
    return int(text) if text else None


def nobody_came(state, seconds: int, reason: str = "") -> str:
    """Returns the last line of a process that waited for others in vain.

    reason: why the launcher was asked again and again.
    """
    if state.coordinator_address is None:
        return (
            f"error: --distributed: nothing told within {seconds} seconds who the "
            f"coordinator is{reason and f' ({reason})'}; give --coordinator=HOST:PORT of "
            "process 0, --processes=N and --process=I"
        )
    return (
        f"error: process {state.process_id} of {state.num_processes} waited {seconds} "
        f"seconds at the coordinator, {state.coordinator_address}, and not all came; is it "
        "the address of process 0, and were all started, each told that they are "
        f"{state.num_processes}, and a number of its own?"
    )


def not_taken(state) -> str:
    """Returns the last line of a process that the coordinator does not know, or no more."""
    return (
        f"error: process {state.process_id} of {state.num_processes}: the coordinator, "
        f"{state.coordinator_address}, does not take it: was it told of fewer processes, has "
        "another one this number, or has it ended?"
    )


def second(index: int, where: str) -> str:
    """Returns the cause where a process has come whose number another has. where: did it."""
    return (
        f"a second process {index} has come, {where}: the first is lost, or two were started "
        f"as --process={index}"
    )


@contextlib.contextmanager
def together():
    """Lets the processes of a run end together, however the code inside ends."""
    try:
        yield
    except BaseException as error:  # also what sys.exit raises
        if group is None:
            raise
        group.leave(error)
    if group is not None:
        group.leave(None)


def fail(error: BaseException) -> None:
    """Ends all processes, if there are many, with an error of a thread beside the main one."""
    if group is not None:
        text, code = ending(error)
        if isinstance(error, exits.CannotGoOn | exits.Stopped):
            stopped = "stopped " * isinstance(error, exits.Stopped)
            text, code = f"{stopped}{error}", exits.code_of(error)
        group.tell("cause", f"{group.name(group.index)} ended: {text}", code, text)


def end(code: int, line: str = "") -> None:
    """Ends this process at once, with a last line.

    Not as sys.exit does: JAX would wait there for others, who may be gone.
    """
    ending_lock.acquire()  # for good: the thread that comes first has the last word

    def write():
        sys.stdout.flush()
        sys.stderr.flush()
        if line:
            os.write(2, f"{line}\n".encode())

    exits.end(code, line, write)


def at_abort(act) -> None:
    """Lets `act` run where this process aborts; the abort goes on if it returns.

    Python's own handlers run only when the interpreter comes to it, which is too late.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: act())
    abort_handlers.append(handler)
    handle(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def deaf() -> None:
    """Lets no signal to stop change any more how this process ends.

    Launchers end a run's last processes by a signal as soon as the first has ended, such as
    srun: where nobody listens yet, the signal's own exit code would be the run's.
    """
    for number in exits.LISTENED:
        handle(number, ctypes.c_void_p(signal.SIG_IGN.value))


def handle(number: int, handler: ctypes.c_void_p) -> None:
    """Sets what a signal does, as C has it: Python lets the main thread alone do so."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(number, handler)


def one_line(error: BaseException) -> str:
    """Returns what an error says, in a line that is not too long."""
    text = " ".join(str(error).split())
    return text[:300]


def ending(error: BaseException) -> tuple[str, int]:
    """Returns (what an error says, the exit code that it leads to)."""
    if not isinstance(error, SystemExit):
        return f"{type(error).__name__}: {one_line(error)}", 1
    said = error if isinstance(error, exits.StoppedAtOnce) else error.__context__
    # KeyboardInterrupt has no words.
    return one_line(said) or type(said).__name__, int(error.code or 0)


def broken(error: BaseException) -> bool:
    """Returns whether an error may only be the effect of another process's end."""
    if isinstance(error, SystemExit) and exits.of_runtime(error.__context__):
        error = error.__context__  # by which a command has ended
    for cause in causes(error):
        if isinstance(cause, SystemExit):
            return False
        named = any(word in str(cause).lower() for word in BROKEN)
        if named and exits.of_runtime(cause):
            return True
    return False


# ---- Signs of life ----


def watch(timer, stuck_after: float) -> None:
    """Tells where this process is when nothing has moved for so many seconds; 0: never.

    timer: a metrics.Timer. It tells again each time the age has doubled.
    """

    def where() -> str:
        return f"in step {timer.step}, phase {timer.phase or 'start'}"

    def look():
        limit = stuck_after
        while True:
            time.sleep(min(stuck_after / 10, 10))
            age = time.monotonic() - timer.moved
            if age < stuck_after:
                limit = stuck_after
            elif age >= limit:
                text = f"warning: {who} is {where()}: nothing has moved for {age:.0f} s"
                print(text, file=sys.stderr, flush=True)
                limit *= 2

    who = f"process 0 on {socket.gethostname()}"
    if group is not None:
        who, group.where = group.name(group.index), lambda: f"; this one is {where()}"
    if stuck_after:
        threading.Thread(target=look, daemon=True).start()


# ---- Alike ---------------------------------------------------------------------------


def agree(facts: dict[str, str]) -> None:
    """Raises ValueError, in every process, where facts differ between the processes.

    It names what differs, and which process has what. All call it as often, in one order.
    """
    if group is None:
        return
    own = json.dumps(facts)
    digests = group.shared("digest", hashlib.sha256(own.encode()).hexdigest())
    if len(set(digests.values())) == 1:
        return
    texts = group.shared("facts", own)
    everyone = {index: json.loads(text) for index, text in sorted(texts.items())}
    names = sorted({name for each in everyone.values() for name in each})
    parts = [part for name in names if (part := difference(name, everyone))]
    more = f" (and {len(parts) - 3} more)" if len(parts) > 3 else ""
    raise ValueError(f"the processes differ: {'; '.join(parts[:3])}{more}")


def of_first(text: str) -> str:
    """Returns a text of process 0, in every process. All call it as often, in one order."""
    return text if group is None else group.shared("first", text)[0]


def difference(name: str, everyone: dict[int, dict[str, str]]) -> str:
    """Returns who has which value of a fact; "" where all have the same."""
    holders = {}
    for index, facts in everyone.items():
        holders.setdefault(facts.get(name, "unknown"), []).append(index)
    if len(holders) == 1:
        return ""
    parts = [
        f"{value} in process {', '.join(map(str, indices))}"
        for value, indices in holders.items()
    ]
    return f"{name} is {' and '.join(parts)}"


def see(file: pathlib.Path) -> None:
    """Raises ValueError, in every process, where one does not see a file of process 0.

    file: in run.folder; process 0 has written it, as no other process or run would.
    """
    if group is None:
        return
    whole = file.absolute()
    mark = of_first(whole.read_text() if group.index == 0 else "")
    seen = group.shared("seen", str(int(shows(whole, mark))))
    folders = group.shared("folder", str(whole.parent))
    parts = [
        f"{folders[index]} of {group.name(index)}"
        for index in sorted(folders)
        if seen[index] == "0"
    ]
    if parts:
        more = f" (and {len(parts) - 3} more)" if len(parts) > 3 else ""
        raise ValueError(
            f"run.folder={file.parent}: {' and '.join(parts[:3])}{more} is another folder "
            f"than {folders[0]} of {group.name(0)}: name one that all processes share, by "
            "its absolute path"
        )


def shows(file: pathlib.Path, text: str) -> bool:
    """Returns whether a file holds a text, or comes to within SEE_S."""
    end_of_it = time.monotonic() + SEE_S
    while True:
        for folder in reversed(file.parents):  # what is opened, NFS asks its server for
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
        with contextlib.suppress(OSError, ValueError):  # ValueError: no UTF-8
            if file.read_text() == text:
                return True
        if time.monotonic() > end_of_it:
            return False
        time.sleep(0.1)


def sources() -> str:
    """Returns what identifies the program's sources."""
    total = hashlib.sha256()
    folder = pathlib.Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return total.hexdigest()[:12]


def contents(weights: dict[str, float]) -> str:
    """Returns what identifies the contents of a mixture's files, with their weights."""
    return " ".join(f"{content(path)}:{weight:g}" for path, weight in weights.items())


def content(path) -> str:
    """Returns what identifies a file's content, whatever its path."""
    if os.path.exists(path) and not os.path.isfile(path):
        return "no file"  # a pipe has nothing for a second reader
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        return str(error.strerror)
