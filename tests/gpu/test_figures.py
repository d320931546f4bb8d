from tests.benchmarks import gpu


def test_the_program_of_the_figures_runs_without_a_gpu():
    """On a CPU the times of a tiny pair mean nothing, but the counts are right."""
    figures = gpu.main("tiny")
    found = figures["forced acceptance 1"]
    assert found["tau"] == gpu.GAMMA + 1
    assert found["texts as without a draft"] == 2
    assert figures["forced acceptance 0.6"]["tau"] < gpu.GAMMA + 1
    assert figures["c"] > 0
