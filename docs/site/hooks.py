"""What MkDocs does besides: API pages, the list of files, the lab, links, and long names in tables."""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from amp.numerics import lab

HOME = "https://github.com/reamp/reamp"
REPOSITORY = f"{HOME}/blob/main/"
DOCS = Path(__file__).parents[1]

API = {
    "training": (
        "Training",
        "initialize scale_loss master_params state_dict load_state_dict Stateful get_state_dict "
        "set_state_dict save step_was_skipped loss_scale history scalars get_session Session "
        "fsdp_policy",
    ),
    "profiles": ("Profiles and rules", "load_profile Properties LossScaling Rule AmpError AmpWarning"),
    "functions": (
        "Functions and ops",
        "disable_casts half_function bfloat16_function float_function promote_function "
        "register_half_function register_bfloat16_function register_float_function "
        "register_promote_function",
    ),
    "diagnosis": (
        "Diagnosis",
        "diagnose diagnosis.Report diagnosis.Finding doctor trials.Prescription trials.Cure check "
        "compare trials.Comparison trials.LevelResult trials.ModuleError trials.Problem "
        "explain trials.Explanation trials.Explained",
    ),
    "grad_scaler": ("GradScaler", "GradScaler"),
    "optimizers": (
        "Fused optimizers",
        "FusedAdam FusedSGD FusedLAMB FusedLion FusedAdagrad FusedNovoGrad fused.FusedOptimizer",
    ),
    "fp16_utils": (
        "fp16_utils",
        "FP16_Optimizer LossScaler DynamicLossScaler network_to_half FP16Model BN_convert_float tofp16 "
        "convert_module convert_network prep_param_lists model_grads_to_master_grads "
        "master_params_to_model_params clip_grad_norm to_python_float SAFE_GLOBALS",
    ),
    "numerics": (
        "Numerics",
        "describe bits round_to ulp neighbours survives_update decode footprint footprints "
        "simulate_scaler gradient_survival fp8_losses fp8_scaled simulate_fp8 watch crises overflow "
        "underflow vanishing_update Format FORMATS Bits Neighbours Footprint ScalerStep FormatSurvival "
        "GradientSurvival Fp8Loss Fp8Step Watch WatchReport WatchedLayer Histogram Crisis",
    ),
    "integrations": (
        "Frameworks",
        "lightning.AmpPrecision huggingface.AmpTrainer huggingface.AmpMixin "
        "huggingface.AmpTrainingArguments accelerate.prepare accelerate.configure accelerate.end "
        "ignite.supervised_training_step timm.AmpScaler",
    ),
    "compat": ("apex", "install uninstall"),
}
"""The API pages: a title, and the names on the page in their order."""

PACKAGES = ("optimizers", "fp16_utils", "numerics", "integrations", "compat")
"""The pages whose names are in the package of that name, and not in `amp`."""

ELSEWHERE = {
    "check": "amp.trials.checking",
    "compare": "amp.trials.comparing",
    "explain": "amp.trials.explaining",
    "scalars": "amp.scalar_log",
    "crises": "amp.numerics.crises",
    "diagnosis.Report": "amp.diagnosis.findings",
    "diagnosis.Finding": "amp.diagnosis.findings",
    "trials.Prescription": "amp.trials.cures",
    "trials.Cure": "amp.trials.cures",
    "trials.Comparison": "amp.trials.results",
    "trials.LevelResult": "amp.trials.results",
    "trials.ModuleError": "amp.trials.results",
    "trials.Problem": "amp.trials.results",
    "trials.Explanation": "amp.trials.explaining",
    "trials.Explained": "amp.trials.explaining",
}
"""Where names are that mkdocstrings does not find: imported when asked for, or named as a module."""

WITHOUT_SIGNATURE = ("Properties", "LossScaling")
"""What users read and do not make: the metadata of their keys would fill the page."""

MEMBERS = {
    "fused.FusedOptimizer": "",
    "trials.Comparison": "is_healthy to_json write_html",
    "Session": "initialize scale_loss loss_scale history state_dict load_state_dict close",
    "FP16_Optimizer": "loss_scale overflow add_param_group zero_grad backward update_master_grads step "
    "clip_master_grads inspect_master_grad_data state_dict load_state_dict",
}
"""What users call, of classes that have more for the rest of the library."""


def block(page: str, name: str) -> str:
    """Return what tells mkdocstrings to document a name, under the name that users write."""
    package = f"amp.{page}" if page in PACKAGES else "amp"
    last = name.rpartition(".")[2]
    lines = [
        f"::: {ELSEWHERE[name]}.{last}" if name in ELSEWHERE else f"::: {package}.{name}",
        "    options:",
        f"      heading: {package}.{name}",
        f"      toc_label: {last}",
    ]
    if name in WITHOUT_SIGNATURE:
        lines += ["      show_signature: false", "      separate_signature: false"]
    if name in MEMBERS:
        lines.append(f"      members: [{', '.join(MEMBERS[name].split())}]")
    return "\n".join(lines)


def on_files(files: Files, config: Any) -> Files:
    """Add the API pages, the list of files, and the lab, whose links stay on the site here."""
    for page, (title, names) in API.items():
        blocks = [block(page, name) for name in names.split()]
        text = "\n\n".join([f"# {title}", *blocks]) + "\n"
        files.append(File.generated(config, f"api/{page}.md", content=text))
    files.append(File.generated(config, "files.md", content=files_page()))
    files.append(File.generated(config, "lab.html", content=kept_inside(lab.page())))
    return files


def files_page() -> str:
    """Return the page that lists the modules, each with the first line of its docstring."""
    packages: dict[str, list[str]] = defaultdict(list)
    for folder in ("amp", "kernels"):
        for path in sorted((DOCS.parent / folder).rglob("*.py")):
            where = path.relative_to(DOCS.parent)
            is_link = any(parent.is_symlink() for parent in path.parents)
            if not is_link and path.name not in ("__init__.py", "__main__.py"):
                summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
                packages[str(where.parent)].append(f"| `{where.name}` | {summary} |")
    parts = [
        f"## `{package}`\n\n| file | what is in it |\n|---|---|\n" + "\n".join(rows)
        for package, rows in packages.items()
        if "apex" not in package
    ]
    head = "# Files", "[Architecture](architecture.md) explains the layers."
    return "\n\n".join([*head, *parts]) + "\n"


def kept_inside(page: str) -> str:
    """Return a page whose links to pages of docs/ lead to those of the site."""
    page = re.sub(rf'"{REPOSITORY}docs/([\w/-]+)\.md([#"])', r'"\1.html\2', page)
    return page.replace(f'"{HOME}"', '"index.html"')


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to files that are not on the site lead to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        name, _, anchor = link[1].partition("#")
        target = posixpath.normpath(posixpath.join(folder, name))
        outside = target.startswith("../") or target.endswith(".py")
        if not name or "://" in name or not outside or not (DOCS / target).exists():
            return link[0]
        path = os.path.relpath(DOCS / target, DOCS.parent)
        return f"]({REPOSITORY}{path}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", led, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Let names in tables and headings break between words, and pages that docstrings name be links."""

    def breakable(code: re.Match[str]) -> str:
        return re.sub(r"(?<=\w[._/=(])(?=\w)|(?<=[a-z])(?=[A-Z]\w)", "<wbr>", code[0])

    def with_breaks(table: re.Match[str]) -> str:
        return re.sub(r"(?<=<code>)[^<]+(?=</code>)", breakable, table[0])

    if page is not None and page.file.src_uri.startswith("api/"):
        output = re.sub(r"(?<=</code>)\s+amp\.[\w.]+", breakable, output)
        output = re.sub(r"\bdocs/([\w/-]+)\.md\b", r'<a href="../\1.html">\g<0></a>', output)
    return re.sub(r"<table>.*?</table>", with_breaks, output, flags=re.DOTALL)
