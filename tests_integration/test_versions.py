"""Families are pinned one by one, and a core outside their range is refused."""


def versions(environment):
    return dict(
        line.split("==")
        for line in environment.check(
            "from importlib.metadata import distributions\n"
            "for d in distributions():\n"
            "    if d.name.startswith('neuralops'): print(f'{d.name}=={d.version}')"
        ).splitlines()
    )


def test_one_family_stays_while_another_moves(environment, wheels, build_version, tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    for package in ("core", "attn", "ssm"):
        for version in ("0.1.0", "0.1.1"):
            build_version(package, version + ("" if version != "0.1.0" else ".post1"), folder)
    links = ("--find-links", str(folder))
    environment.install(*links, "neuralops-ssm==0.1.0.post1", "neuralops-attn==0.1.0.post1")
    environment.install(*links, "--upgrade", "neuralops-attn", "neuralops-ssm==0.1.0.post1")
    assert versions(environment) == {
        "neuralops-core": versions(environment)["neuralops-core"],
        "neuralops-attn": "0.1.1",
        "neuralops-ssm": "0.1.0.post1",
    }
    code = "import neuralops.ssm, neuralops.attn\nprint(neuralops.ssm.__version__)"
    assert environment.check(code) == "0.1.0.post1"


def test_a_core_outside_the_range_is_refused(environment, wheels, build_version, tmp_path):
    folder = tmp_path / "index"
    folder.mkdir()
    build_version("core", "0.2.0", folder)
    links = ("--find-links", str(wheels), "--find-links", str(folder))
    done = environment.pip(*links, "neuralops-ssm", "neuralops-core==0.2.0")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "ResolutionImpossible" in said
    assert "neuralops-ssm 0.1.0 depends on neuralops-core<0.2 and >=0.1" in said
    assert "The user requested neuralops-core==0.2.0" in said
    environment.install(*links, "neuralops-ssm")
    assert versions(environment)["neuralops-core"] == "0.1.0"
