"""What a run is made of, where no whole run shows it."""

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.rl import networks


def test_every_new_reference_is_a_copy_by_the_same_program():
    policy = {"embed": jnp.full((2, 3), 0.1), "value_head": jnp.ones(3)}
    place = policy["embed"].sharding
    like = {"embed": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16, sharding=place)}
    programs = networks.copier.cache_info().misses
    for _ in range(2):
        made = networks.as_reference(policy, like)
        assert list(made) == ["embed"] and made["embed"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(made["embed"], policy["embed"].astype("bfloat16"))
    assert networks.copier.cache_info().misses == programs + 1
    copy = networks.as_reference({"embed": made["embed"]}, like)["embed"]
    assert copy is not made["embed"]  # the policy may be donated
    copy.delete()
    assert not made["embed"].is_deleted()
