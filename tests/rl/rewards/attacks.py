"""What hostile programs try, each under a name; `escapes.py` runs them in the jail.

A program has read `facts`, what the attacker is told of the world, and calls leak(what)
when it gets out. It has `libc`, and `call(number, ...)` for system calls by number. What it
does to the world without a word, `escapes.py` sees for itself.
"""

BEFORE = """
import ctypes, json, os, socket, sys, time
facts = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)
def leak(what):
    os.write(1, f"LEAK {what!r:.200}\\n".encode())
def call(number, *args):
    return libc.syscall(ctypes.c_long(number), *args)
"""

READ = """
import pathlib
for path in {paths}:
    try:
        found = pathlib.Path(path).read_bytes()[:50]
        leak((path, found))
    except OSError:
        pass
"""


def reads(*paths: str) -> str:
    """Returns a program that reads what it should not."""
    return READ.format(paths="[" + ", ".join(paths) + "]")


def calls(*numbers: str) -> str:
    """Returns a program in which system calls, written with arguments, must all fail."""
    rows = [f"if call({x}) >= 0: leak({x!r})" for x in numbers]
    return "\n".join(rows)


def forks(what: str) -> str:
    """Returns a program in which a process must not come to be."""
    return f"try:\n    {what}\n    leak('a process')\nexcept OSError:\n    pass\n"


ATTACKS = {
    # ---- Reading
    "shadow": reads("'/etc/shadow'", "'/etc/passwd'", "'/etc/hostname'"),
    "secret": reads("facts['secret']"),
    "home": reads(
        "'/root/.bashrc'", "'/root/.profile'", "os.path.expanduser('~/.bashrc')"
    ),
    "this repository": reads("facts['source']"),
    "installed packages": """
import glob, sysconfig
for folder in facts['sites']:
    for path in glob.glob(folder + '/*/*.py')[:20] + glob.glob(folder + '/*.py')[:20]:
        try:
            open(path).read(); leak(path)
        except OSError: pass
""",
    "proc of the parent": """
for name in ('environ', 'cmdline', 'mem', 'maps', 'root/etc/passwd'):
    for pid in (os.getppid(), facts['victim'], facts['driver'], 1):
        try: leak((name, open(f'/proc/{pid}/{name}', 'rb').read(20)))
        except OSError: pass
""",
    "proc of all": """
try: names = os.listdir('/proc')
except OSError: names = []
for pid in names:
    if pid.isdigit() and int(pid) != os.getpid():
        for name in ('environ', 'cmdline', 'status'):
            try: leak(open(f'/proc/{pid}/{name}').read(20))
            except OSError: pass
""",
    "descriptors of others": """
for pid in [os.getppid(), facts['driver'], *range(1, 40)]:
    if pid == os.getpid(): continue
    for number in range(3, 30):
        for flags in (os.O_RDONLY, os.O_WRONLY):
            try: leak((pid, os.open(f'/proc/{pid}/fd/{number}', flags | os.O_NONBLOCK)))
            except OSError: pass
""",
    "raw devices": reads(
        "*['/dev/' + x for x in ('mem', 'kmsg', 'sda', 'vda', 'nvme0n1', 'kvm', 'tty')]"
    ),
    "proc sys": """
for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/kallsyms'):
    for mode in ('rb', 'r+b'):
        try: leak(open(path, mode).read(9))
        except OSError: pass
""",
    "cgroup": """
for path in ('/sys/fs/cgroup/cgroup.procs', '/proc/self/cgroup'):
    try: leak(open(path).read(9))
    except OSError: pass
try: open('/sys/fs/cgroup/cgroup.procs', 'w').write('1'); leak('cgroup')
except OSError: pass
""",
    "inherited descriptors": """
for number in range(3, 4096):
    try: os.fstat(number); leak((number, os.read(number, 20)))
    except BlockingIOError: leak(number)
    except OSError: pass
""",
    "inherited environment": "if 'SECRET' in os.environ: leak(os.environ['SECRET'])",
    "environment in memory": """
import gc
libc.getenv.restype = ctypes.c_char_p
if libc.getenv(b'SECRET'): leak(libc.getenv(b'SECRET'))
for x in gc.get_objects():
    if isinstance(x, dict) and 'SECRET' in x: leak(x['SECRET'])
""",
    "memory of the jail": """
import gc
for module in list(sys.modules.values()):
    for value in list(getattr(module, '__dict__', {}).values()):
        if isinstance(value, (str, bytes)) and len(value) < 9000:
            if facts['token'] in str(value) and module.__name__ != '__main__':
                leak(module.__name__)
frame = sys._getframe()
while frame:
    for key, value in list(frame.f_locals.items()):
        if isinstance(value, (dict, list)) and 'tests' in str(value)[:500] and key != 'facts':
            leak(key)
    frame = frame.f_back
""",
    # ---- Writing
    "outside": """
for path in (facts['folder'] + '/new', '/tmp/new', '/var/tmp/new', '/dev/shm/new', 'new'):
    try: open(path, 'w').write('x'); leak(path)
    except OSError: pass
""",
    "the secret": """
for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC):
    try: os.open(facts['secret'], flags); leak(flags)
    except OSError: pass
""",
    "the interpreter": """
for path in (os.__file__, sys.executable, ctypes.__file__):
    for mode in ('r+b', 'ab'):
        try: open(path, mode); leak(path)
        except OSError: pass
    try: os.unlink(path); leak(path)
    except OSError: pass
    try: os.open(path, os.O_RDONLY | os.O_TRUNC); leak(path)
    except OSError: pass
""",
    "links": """
for make in (os.symlink, os.link, os.rename):
    for target in ('/tmp/l', facts['folder'] + '/l'):
        try: make(facts['secret'], target); leak(make.__name__)
        except OSError: pass
""",
    "modes": """
for do in (lambda p: os.chmod(p, 0o4777), lambda p: os.chown(p, 0, 0), os.utime,
           lambda p: os.setxattr(p, 'user.a', b'x'), lambda p: os.truncate(p, 0)):
    try: do(facts['secret']); leak(do)
    except OSError: pass
""",
    "device node": """
try: os.mknod('/tmp/node', 0o60666, 0x801); leak('mknod')
except OSError: pass
""",
    "disk": """
import tempfile
try:
    file = tempfile.TemporaryFile(); file.write(b'x' * 2**20); leak('temporary file')
except OSError: pass
""",
    "many files": """
for folder in ('/tmp', facts['folder'], '/', '/dev/shm'):
    for i in range(1000):
        try: open(f'{folder}/{i}', 'w').close(); leak(folder)
        except OSError: break
""",
    "shared memory": """
from multiprocessing import shared_memory
try: shared_memory.SharedMemory(create=True, size=2**20); leak('shm')
except OSError: pass
if call(29, 0, ctypes.c_size_t(2**20), 0o1666) >= 0: leak('shmget')
""",
    "memory file": """
try: leak(os.memfd_create('x'))
except OSError: pass
if call(447, 0) >= 0: leak('memfd_secret')
""",
    # ---- Network
    "tcp": """
for host in ('127.0.0.1', '::1'):
    try: socket.create_connection((host, facts['tcp']), 1); leak(host)
    except OSError: pass
""",
    "udp": """
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', facts['udp']))
    leak('udp')
except OSError: pass
""",
    "listening": """
try: s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); leak('bind')
except OSError: pass
""",
    "unix path": """
try: socket.socket(socket.AF_UNIX).connect(facts['unix']); leak('unix')
except OSError: pass
""",
    "unix abstract": """
try: socket.socket(socket.AF_UNIX).connect('\\0' + facts['abstract']); leak('abstract')
except OSError: pass
""",
    "socket pair": """
try: socket.socketpair(); leak('socketpair')
except OSError: pass
""",
    "other families": """
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        if libc.socket(family, kind, 0) >= 0: leak((family, kind))
""",
    "io_uring": calls("425, 8, ctypes.create_string_buffer(200)"),
    # ---- Processes
    "fork": forks("os.fork() or time.sleep(1)"),
    "fork bomb": "while True:\n    try: os.fork()\n    except OSError: break\n",
    "vfork and clone": calls(
        "57", "58", "56, 17, 0, 0, 0, 0", "56, 0x10000011, 0, 0, 0, 0"
    ),
    "clone3": calls("435, ctypes.create_string_buffer(bytes(88)), ctypes.c_size_t(88)"),
    "exec": """
for path in ('/bin/sh', sys.executable, '/proc/self/exe'):
    try: os.execv(path, [path, '-c', 'echo LEAK'])
    except OSError: pass
if call(322, -100, b'/bin/sh', 0, 0, 0) >= 0: leak('execveat')
""",
    "subprocess": """
import subprocess
try: subprocess.Popen(['/bin/true']); leak('popen')
except OSError: pass
if libc.system(b'true') == 0: leak('system')
""",
    "daemon": forks(
        "os.fork() and os._exit(0); os.setsid(); os.fork(); time.sleep(99)"
    ),
    "threads": """
import threading
threading.stack_size(2**23)
try:
    for _ in range(10000): threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
    leak('threads')
except (RuntimeError, MemoryError): pass
os._exit(0)
""",
    "kill": """
for pid in (os.getppid(), facts['victim'], facts['driver'], 0, -1, -facts['victim']):
    for number in (9, 15, 0):
        try:
            os.kill(pid, number); leak(pid)
        except OSError: pass
try: os.killpg(0, 9); leak('group')
except OSError: pass
""",
    "other ways to signal": """
import fcntl, signal
victim = facts['victim']
for number, *args in ((234, victim, victim, 9), (200, victim, 9), (129, victim, 9, 0),
                      (424, 3, 9, 0, 0), (434, victim, 0)):
    if call(number, *args) >= 0: leak(number)
r, w = os.pipe()
for command, value in ((8, victim), (10, 9)):
    try: fcntl.fcntl(r, command, value); leak('F_SETOWN')
    except OSError: pass
try: fcntl.fcntl(r, 4, os.O_ASYNC); os.write(w, b'x')
except OSError: pass
""",
    "ptrace": """
for pid in (os.getppid(), facts['victim'], facts['driver']):
    if libc.ptrace(16, pid, 0, 0) == 0: leak(pid)
    if libc.ptrace(0x4206, pid, 0, 0) == 0: leak(pid)
""",
    "memory of others": """
data = ctypes.create_string_buffer(64)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(data), 64)
for pid in (os.getppid(), facts['victim'], facts['driver']):
    for number in (310, 311):
        if call(number, pid, vector, 1, vector, 1, 0) >= 0: leak(number)
    if call(312, pid, pid, 0, 0, 0) >= 0: leak('kcmp')
""",
    "clocks of others": """
for pid in (os.getppid(), facts['victim'], facts['driver'], 1):
    try: leak(time.clock_gettime((~pid << 3) | 2))
    except OSError: pass
""",
    "limits of others": """
import resource
for pid in (os.getppid(), facts['victim']):
    try: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)); leak(pid)
    except OSError: pass
""",
    # ---- Privileges
    "raising limits": """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
    before = resource.getrlimit(kind)
    try: resource.setrlimit(kind, (-1, -1)); resource.prlimit(0, kind, (-1, -1))
    except (OSError, ValueError): pass
    if resource.getrlimit(kind) != before: leak(kind)
""",
    "namespaces": calls(
        *(f"272, 0x{x:x}" for x in (0x10000000, 0x20000, 0x40000000, 0x20000000)),
        "308, 3, 0",
    ),
    "mounts": calls(
        "165, b'none', b'/tmp', b'tmpfs', 0, 0",
        "166, b'/', 2",
        "155, b'.', b'.'",
        "161, b'/'",
        "428, -100, b'/', 0",
        "430, b'tmpfs', 0",
    ),
    "identity": """
for do in (lambda: os.setuid(0), lambda: os.setuid(1234), lambda: os.setgid(0),
           lambda: os.setgroups([0]), lambda: os.setresuid(0, 0, 0)):
    try: do(); leak('identity')
    except OSError: pass
if call(157, 8, 1, 0, 0, 0) >= 0: leak('prctl')
""",
    "kernel interfaces": calls(
        "321, 0, 0, 0",
        "250, 0, 0, 0",
        "248, b'user', b'x', b'x', 1, -3",
        "323, 0",
        "298, 0, 0, -1, -1, 0",
        "300, 0, 0",
        "317, 0, 0, 0",
        "446, 3, 0",
        "175, 0, 0, b''",
        "246, 0, 0, 0",
        "169, 0, 0, 0",
        "163, b'/tmp/acct'",
        "167, b'/tmp/swap', 0",
        "170, b'name', 4",
        "227, 0, ctypes.create_string_buffer(16)",
        "203, 0, 8, ctypes.create_string_buffer(8)",
        "141, 0, 0, -20",
        "304, 0, 0, 0",
        "253",
        "282, -1, 0, 8",
        "240, b'queue', 66, 0o600, 0",
        "9999",
    ),
    "foreign calls": """
import mmap
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(b'\\xb8\\x02\\x00\\x00\\x00\\xcd\\x80\\xc3')  # int 0x80: fork, as 32 bits count
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
if ctypes.CFUNCTYPE(ctypes.c_int)(address)() >= 0: leak('int 0x80')
""",
    "x32 calls": calls("0x40000000 + 57", "0x40000000 + 41, 1, 1, 0"),
    "terminal": """
import fcntl
for number in (0, 1, 2):
    for command in (0x5412, 0x540E, 0x541C, 0x5414):
        try: fcntl.ioctl(number, command, b'x' * 8); leak(command)
        except OSError: pass
""",
    # ---- Using up
    "memory": "x = [bytearray(2**24) for _ in range(400)]\nleak('6 GiB')",
    "mapped memory": """
import mmap
held = []
try:
    for _ in range(100): held.append(mmap.mmap(-1, 2**26))
    leak('6 GiB')
except (OSError, MemoryError): pass
""",
    "output": "while True: os.write(1, b'x' * 65536)",
    "spin": "while True: pass",
    "sleep": "time.sleep(99)",
    "ignored signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "large power": "9**9**8",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(x): return [f(x + 1)]\nf(0)",
    "crash": "ctypes.string_at(0)",
    "silent end": "os._exit(0)",
    "other end": "sys.exit(82)",
}
HONEST = "print(sum(map(int, sys.stdin.read().split())))"
