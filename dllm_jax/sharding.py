"""Where arrays live: one mesh of three axes and two rule tables over dimension letters.

`data` replicates parameters (across slices or nodes), `fsdp` also splits them, and
`model` splits heads, feed-forward, experts and vocabulary. Every array's dimensions are
letters of the alphabet (B rows, D width, N heads, ...); a table says which mesh axes carry
a letter, and a dimension whose letter is in none, or which does not divide its axes, is
replicated.
"""

import functools

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "model")
# What `model` splits of parameters and activations alike: query and key/value heads, the
# inner widths of feed-forwards (an expert's and the shared experts' too), experts, and the
# vocabulary. Of two such letters in one array the first takes the axis.
MODEL = dict.fromkeys(("N", "K", "F", "I", "Z", "E", "V"), "model")
PARAM = {"D": "fsdp", "e": "fsdp"} | MODEL  # e: the width of a vision tower
# Rows, rows x positions flattened, and pages: each device has pages of its own.
ACT = dict.fromkeys(("B", "R", "P"), ("data", "fsdp")) | MODEL


def row_shards(mesh: Mesh) -> int:
    """Returns over how many devices a mesh splits rows; `model` has them whole."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def make_mesh(*, data=1, fsdp=-1, model=1, devices=None) -> Mesh:
    """Returns the mesh; an axis given as -1 takes the devices that are left.

    Raises ValueError when the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "model": model}
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"mesh: only one axis may be -1, got {sizes}")
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    count = len(devices)
    if free and count % fixed:
        set_to = " x ".join(f"mesh.{x}={n}" for x, n in sizes.items() if n != -1)
        raise ValueError(
            f"mesh: {set_to} does not divide {count} device(s), of which mesh.{free[0]}=-1 "
            "takes what is left"
        )
    if free:
        sizes[free[0]] = count // fixed
    if int(np.prod(list(sizes.values()))) != count:
        raise ValueError(
            f"mesh: data x fsdp x model = {sizes} does not cover {count} "
            "device(s); set one axis to -1 to let it take what is left"
        )
    # jax.make_mesh refuses a mesh that splits an axis of a TPU's torus; we need not.
    grid = mesh_utils.create_device_mesh(
        tuple(sizes.values()), list(devices), allow_split_physical_axes=True
    )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def on_own_mesh(method):
    """Makes a method run with `self.mesh` in force, whichever was."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with jax.set_mesh(self.mesh):
            return method(self, *args, **kwargs)

    return run


def key_on(mesh: Mesh, key: jax.Array) -> jax.Array:
    """Returns a typed random key for programs on `mesh`, if it was made on another one."""
    made_on = jax.typeof(key).sharding.mesh
    if made_on.empty or made_on == mesh.abstract_mesh:
        return key
    words = np.asarray(jax.random.key_data(key))  # few, and every process has them
    with jax.set_mesh(mesh):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))


def pspec(dims: str, shape: tuple[int, ...], rules: dict, mesh) -> PartitionSpec:
    """Returns the partition of an array whose dimensions are the letters `dims`.

    rules: ACT or PARAM. An axis splits one dimension only, the first that it can.
    """
    taken, splits = set(), []
    for letter, size in zip(dims, shape, strict=True):
        axes = rules.get(letter, ())
        axes = (axes,) if isinstance(axes, str) else axes
        axes = tuple(a for a in axes if a not in taken and mesh.shape[a] > 1)
        if axes and size % int(np.prod([mesh.shape[a] for a in axes])) == 0:
            taken.update(axes)
            splits.append(axes if len(axes) > 1 else axes[0])
        else:
            splits.append(None)
    # As a program's results have it: to jit a spec with None at its end is another one.
    while splits and splits[-1] is None:
        splits.pop()
    return PartitionSpec(*splits)


def named(dims: str, shape: tuple[int, ...], rules: dict, mesh) -> NamedSharding:
    """Returns `pspec` bound to `mesh`."""
    return NamedSharding(mesh, pspec(dims, shape, rules, mesh))


def constrain(x: jax.Array, dims: str, rules: dict = ACT) -> jax.Array:
    """Lays an activation out by a table of rules on the mesh in force, if there is one.

    Inside jit it tells XLA where the array is to be; what has to move for it moves there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, pspec(dims, x.shape, rules, mesh))


def constrain_rows(tree):
    """Lays activations out by rows, their first dimension; scalars are left alone."""

    def by_row(x):
        return constrain(x, "B" + "." * (x.ndim - 1)) if x.ndim else x

    return jax.tree.map(by_row, tree)


def per_device(f, dims_in, dims_out, *args):
    """Returns f of each device's part of `args`, for code that XLA cannot split itself.

    dims_in: the letters of each argument, or a tree of them; dims_out: those of the
    results. A letter has one size in all of them. Without a mesh, or where the caller is
    per device already, it is f(*args).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return f(*args)
    sizes = {}
    for dims, x in zip(jax.tree.leaves(dims_in), jax.tree.leaves(args), strict=True):
        sizes |= dict(zip(dims, x.shape, strict=True))

    def spec(dims):
        return pspec(dims, tuple(sizes[letter] for letter in dims), ACT, mesh)

    in_specs, out_specs = (jax.tree.map(spec, dims) for dims in (dims_in, dims_out))
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )(*args)


def place(x, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Puts a host array, the same in every process, on the mesh as `spec` says."""
    x = np.asarray(x)
    return jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, spec), lambda index: x[index]
    )


def place_rows(tree, mesh: Mesh, axis: int = 0):
    """Puts host arrays on the mesh, split over rows (dimension `axis`)."""

    def put(x):
        return place(x, rows_spec(np.shape(x), mesh, axis), mesh)

    return jax.tree.map(put, tree)


def shapes_of_rows(tree, mesh: Mesh, axis: int = 0):
    """Returns what `place_rows` makes, as shapes with shardings: nothing is put anywhere."""

    def shape(x):
        x = np.asarray(x)
        placed = NamedSharding(mesh, rows_spec(x.shape, mesh, axis))
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=placed)

    return jax.tree.map(shape, tree)


def rows_spec(shape: tuple[int, ...], mesh: Mesh, axis: int) -> PartitionSpec:
    """Returns the partition of an array whose dimension `axis` is of rows."""
    # "_" is a letter of no rule.
    dims = "".join("B" if i == axis else "_" for i in range(len(shape)))
    return pspec(dims, shape, ACT, mesh)


def laid_out(lowered):
    """Returns what a lowered program gives, as shapes with the shardings it will have."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        lowered.out_info,
        lowered.compile().output_shardings,
    )


def fetch(tree):
    """Returns host copies of device arrays, whole in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(
        lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree
    )


def of_first(x) -> np.ndarray:
    """Returns a host array of at most 32 bits a number as process 0 has it, in all."""
    if jax.process_count() == 1:
        return x
    return np.asarray(multihost_utils.broadcast_one_to_all(x))


def anywhere(fact: bool) -> bool:
    """Returns whether any process says so; all ask at the same call."""
    return bool(largest(int(fact)))


def largest(count: int) -> int:
    """Returns the largest that a process says, of ints of 32 bits; all ask at the same call."""
    if jax.process_count() == 1:
        return count
    return int(np.max(multihost_utils.process_allgather(np.array([count], np.int32))))


def told(text: str) -> list[str]:
    """Returns what each process says, without NULs; all ask at the same call."""
    if jax.process_count() == 1:
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    own = np.pad(own, (0, largest(len(own)) - len(own)))
    every = np.asarray(multihost_utils.process_allgather(own))
    return [row.tobytes().rstrip(b"\0").decode() for row in every]


def gathered(own_n: np.ndarray, first: int = 0) -> np.ndarray:
    """Returns the items that each process has filled in, those of `dealt`, in all of them."""
    if jax.process_count() == 1:
        return own_n
    rows = np.asarray(multihost_utils.process_allgather(own_n))  # one of each process
    out_n = np.empty_like(own_n)
    for index, row_n in enumerate(rows):
        share = slice((index - first) % len(rows), None, len(rows))
        out_n[share] = row_n[share]
    return out_n


def dealt(first: int = 0) -> slice:
    """Returns which items of a list on the host are for this process to work on.

    first: the number of its first item, where it is a part of a longer one.
    """
    count = jax.process_count()
    return slice((jax.process_index() - first) % count, None, count)
