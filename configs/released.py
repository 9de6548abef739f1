"""The released models that presets are named after, and whose settings each is run with.

A config file of a method has up to three recipes: one of models that attend by blocks (SDAR,
TraDo), and dLLM-RL's for Dream and for LLaDA and MMaDA, which attend to the whole canvas.
None of these presets was ever run: they want accelerators and data, and there were none.
What is known of them: `make budget` compiles their steps for TPU and H200 slices, and counts
what these take (docs/scaling.md).
"""

# Preset: the repository, and the recipe it takes.
MODELS = {
    "sdar-1.7b": ("JetLM/SDAR-1.7B-Chat", "block"),
    "sdar-4b": ("JetLM/SDAR-4B-Chat", "block"),
    "sdar-8b": ("JetLM/SDAR-8B-Chat", "block"),
    "trado-4b": ("Gen-Verse/TraDo-4B-Instruct", "block"),
    "trado-8b": ("Gen-Verse/TraDo-8B-Instruct", "block"),
    "dream-7b": ("Dream-org/Dream-v0-Instruct-7B", "dream"),
    "diffucoder-7b": ("apple/DiffuCoder-7B-Instruct", "dream"),
    "llada-8b": ("GSAI-ML/LLaDA-8B-Instruct", "llada"),
    "llada-1.5-8b": ("GSAI-ML/LLaDA-1.5", "llada"),
    "mmada-8b": ("Gen-Verse/MMaDA-8B-MixCoT", "llada"),
}
# The same of models that are asked about images: the recipe is LLaDA-V's, or MMaDA's.
LOOKING = {
    "llada-v-8b": ("GSAI-ML/LLaDA-V", "lladav"),
    "mmada-8b-images": ("Gen-Verse/MMaDA-8B-MixCoT", "mmada"),
}


def presets(method: str, *, block, dream, llada) -> dict:
    """Returns a preset for every released model: its recipe, on its checkpoint.

    method: the last name of the run's folder. block, dream, llada: the recipes, functions
    that change a configuration.
    """
    return made(MODELS, {"block": block, "dream": dream, "llada": llada}, method)


def looking(method: str, **recipes) -> dict:
    """Returns a preset for every model that is asked about images: see `presets`.

    recipes: by the names that LOOKING has.
    """
    return made(LOOKING, recipes, f"images/{method}")


def made(models: dict, recipes: dict, method: str) -> dict:
    """Returns a preset for each of some models, by name."""
    return {
        name: preset(recipes[kind], repository, method)
        for name, (repository, kind) in models.items()
    }


def preset(recipe, repository: str, method: str):
    """Returns a function that sets a recipe on one released checkpoint."""

    def change(c):
        recipe(c)
        c.model.path = repository
        c.run.folder = f"runs/{repository.split('/')[-1]}/{method}"

    return change
