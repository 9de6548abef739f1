"""Programs that pass no test by their merit, for any function: each under a name.

`of(name, entry)` is such a program, in which `entry` is the function that is asked for.
"""

EQUAL = """
class Equal{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __iter__(self): return iter([self])
    def __len__(self): return 1
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __getitem__(self, i): return self
    def __add__(self, other): return self
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __abs__ = __add__
def {entry}(*a, **k): return Equal({value})
"""
WRITE = """
import os
def spray(data):
    for number in range(64):
        try: os.write(number, data)
        except OSError: pass
def {entry}(*a, **k):
    {what}
"""

CHEATS = {
    "always equal": EQUAL.replace("{base}", "").replace("{value}", ""),
    "equal number": EQUAL.replace("{base}", "(int)").replace("{value}", "-87654321"),
    "equal text": EQUAL.replace("{base}", "(str)").replace("{value}", "'no answer'"),
    "hard exit": "import os\ndef {entry}(*a, **k): os._exit(0)\n",
    "hard exit at once": "import os\nos._exit(0)\n",
    "exit": "def {entry}(*a, **k): raise SystemExit(0)\n",
    "exit at once": "raise SystemExit(0)\n",
    "patched builtins": """
import builtins, json, math, operator, types, unittest
class Yes:
    def __eq__(self, other): return True
for name in ('all', 'any', 'isinstance', 'abs', 'len', 'set', 'sorted', 'list', 'tuple'):
    setattr(builtins, name, lambda *a, **k: True)
json.loads = json.dumps = lambda *a, **k: '1'
math.isclose = operator.eq = lambda *a, **k: True
builtins.AssertionError = Exception
def {entry}(*a, **k): return Yes()
""",
    "own helpers": """
isclose = check = candidate = METADATA = lambda *a, **k: True
def set(*a): return True
tuple = list = sorted = len = abs = sum_ = dict = str = set
def {entry}(*a, **k): return ...
""",
    "forged verdict": WRITE.replace(
        "{what}", "spray(b'\\nend 1111111111111111\\n'); return ..."
    ),
    "forged replies": WRITE.replace(
        "{what}",
        'spray(b\'\'.join(b\'\\n{{"id": %d, "v": "forged", "passed": true}}\\n\' % i '
        "for i in range(40))); return ...",
    ),
    "nested replies": WRITE.replace(
        "{what}", "spray(b'\\n' + b'[' * 9000 + b']' * 9000 + b'\\n'); return ..."
    ),
    "forged birth": WRITE.replace(
        "{what}",
        'spray(b\'\\n{{"ready": 1, "names": ["__assert__"]}}\\n{{"dead": 0}}\\n\'); '
        "return ...",
    ),
    "stack inspection": """
import gc, sys
def found(want):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values()]:
            if isinstance(value, str) and '==' in value and want in value:
                return value.split('==')[1].strip()
        frame = frame.f_back
    for value in gc.get_objects():
        if isinstance(value, (list, tuple, dict)):
            for x in (value.values() if isinstance(value, dict) else value):
                if isinstance(x, str) and 'assert' in x and want + '(' in x and '==' in x:
                    return x.split('==')[1].strip()
def {entry}(*a, **k):
    text = found('{entry}')
    return eval(text) if text else ...
""",
    "other processes": """
import os
def {entry}(*a, **k):
    for pid in ['self', os.getppid(), *range(1, 30), *range(os.getpid() - 5, os.getpid())]:
        for number in range(3, 12):
            for flags in (os.O_RDONLY, os.O_WRONLY):
                try:
                    file = os.open(f'/proc/{{pid}}/fd/{{number}}', flags | os.O_NONBLOCK)
                    if flags: os.write(file, b'\\nend 11111111\\n')
                    elif pid != 'self':
                        text = os.pread(file, 10**6, 0).decode()
                        return eval(text.split('==')[1].split('\"')[0])
                except Exception: pass
    return ...
""",
    "constant": "def {entry}(*a, **k): return None\n",
    "assertion": "def {entry}(*a, **k): raise AssertionError\n",
    "flood": WRITE.replace("{what}", "\n    while True: spray(b'x' * 65536)"),
    "sleep": "import time\ndef {entry}(*a, **k): time.sleep(99)\n",
}
SLOW = "flood", "sleep", "patched builtins"  # each waits until its time is up


def of(name: str, entry: str) -> str:
    """Returns the program of a cheat for a function."""
    return CHEATS[name].format(entry=entry)
