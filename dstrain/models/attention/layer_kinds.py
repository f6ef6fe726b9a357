"""The kinds of layers of a text model of transformers, read from its source: which of them mix the tokens of a row."""

# A decoder that generates keeps the history of each layer in a cache, so its source says how a layer mixes tokens. A
# layer of attention hands its keys and values to the cache and calls transformers' attention functions. A recurrent
# layer or a short convolution keeps its state in the cache. A layer without a cache treats each token alike.
# Modules are parsed, not imported: the planner runs on login nodes without torch.

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

CAUSAL_MASKS = frozenset(
    {"create_causal_mask", "create_sliding_window_causal_mask", "create_recurrent_attention_mask",
     "create_masks_for_generate"}
)  # fmt: skip
"""Functions of transformers' masking_utils whose masks follow from the groups of a packed row."""
EXTRA_MASKS = frozenset({"or_mask_function", "and_mask_function", "block_sequence_ids"})
"""Arguments of theirs that let tokens attend to later ones, such as those of the same image."""
TEXT_GUARDS = ("use_bidirectional_attention", "token_type_ids is not None")
"""Conditions for them that hold in no pass of a text model: `attends_both_ways` reads the setting, and no text has types."""
WINDOW_MASKS = frozenset({"create_sliding_window_causal_mask", "create_masks_for_generate"})
STATE_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
"""Methods of transformers' caches that keep the state of a recurrent layer or a short convolution."""
CACHE_METHODS = STATE_UPDATES | {
    "update", "get_seq_length", "get_conv_state", "get_recurrent_state", "is_recording_past", "has_previous_state",
}  # fmt: skip
CACHE_NAMES = frozenset({"cache", "past_key_values", "past_key_value", "cache_params", "layer_past"})
INITIAL_STATES = frozenset({"initial_state", "initial_states"})
"""Arguments of recurrences over more than one token."""
INITIALIZERS = frozenset({"__init__", "_init_weights"})


@dataclass(frozen=True)
class LayerKinds:
    """What the source of a text model says about its layers."""

    attention: tuple[str, ...] = ()
    """Classes that call transformers' attention functions."""
    recurrent: tuple[str, ...] = ()
    """Classes that keep a state in the cache: linear attention, state-space models, short convolutions."""
    without_arguments: tuple[str, ...] = ()
    """Those of both kinds that do not get the arguments of the pass from the layer around them."""
    unknown: str | None = None
    """Which class mixes tokens in another way, and how; None: no class does."""
    window_without_mask: str | None = None
    """Class whose attention has a window (`sliding_window`) that the model's masks do not have; None: no class has."""
    may_read_padding: bool = False
    """Padding on the left may reach a token: a layer mixes tokens in an unknown way, or has a state and reads no mask."""
    takes_lengths: tuple[str, ...] = ()
    """Recurrent classes whose kernels read a packed row in one call (`cu_seq_lens_q`, `seq_idx`)."""
    restarts: tuple[str, ...] = ()
    """Recurrent classes that cannot begin in a given state, so that each branch reads its prefix again."""

    @property
    def needs_no_mask(self) -> bool:
        """Whether padding on the right changes nothing in the tokens before it, without an attention mask.

        Each layer is causal then, and positions count from the start of the row. Recurrent layers keep the mask.
        """
        return self.unknown is None and not self.recurrent


MODEL_TABLE, CAUSAL_TABLE, IMAGE_TABLE = (
    "MODEL_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)  # fmt: skip
"""Tables of transformers' auto classes: model type -> class of the model, with a causal head, with images."""
COUNTED_BY_PATCHES = "qwen2_5_vl"
"""Family whose positions of images `dstrain.data.vision.processor.packed_rope_positions` computes."""


@cache
def read_layer_kinds(model_type: str) -> LayerKinds:
    """Return the kinds of layers of the text models of a type of the installed transformers."""
    class_name, classes = _find_classes(model_type)
    if class_name not in classes:
        return LayerKinds(unknown=f"transformers has no text model of type {model_type}", may_read_padding=True)
    modules = [classes[name] for name in _reachable(classes, class_name)]
    recurrent = [module for module in modules if module.is_recurrent]
    attention = [module.name for module in modules if module.is_attention]
    head = classes.get(_auto_table("modeling_auto.py", CAUSAL_TABLE).get(model_type, ""))
    with_head = modules if head is None else [*modules, head]
    mixers = {*attention, *(module.name for module in recurrent)}
    without_arguments: set[str] = set()
    problems = [] if mixers else [f"no layer of {class_name} calls transformers' attention functions"]
    for module in with_head:
        problem = module.mixing_problem()
        problems += [] if problem is None else [f"{module.name} {problem}"]
    mixes_otherwise = bool(problems)
    for module in with_head:
        for call in module.incomplete_calls(classes, mixers):
            called = module.called_classes(call, classes)
            if called <= mixers and module.takes_keywords and all(classes[name].takes_keywords for name in called):
                without_arguments |= called
            else:
                problems.append(f"{module.name} does not hand its arguments on to {ast.unparse(call.func)}")
    if attention and not classes[class_name].takes("position_ids"):
        problems.append(f"{class_name} takes no positions")
    has_window_masks = any(module.named & WINDOW_MASKS for module in modules)
    windows = [module.name for module in modules if module.is_attention and "sliding_window" in module.keywords]
    # The state of a convolution always goes before its next inputs; a recurrence needs an argument for its state.
    scans = [module for module in recurrent if "update_recurrent_state" in module.cache_methods]
    return LayerKinds(
        attention=tuple(attention), recurrent=tuple(module.name for module in recurrent),
        without_arguments=tuple(sorted(without_arguments)),
        unknown=problems[0] if problems else None,
        window_without_mask=windows[0] if windows and not has_window_masks else None,
        may_read_padding=mixes_otherwise or any(not module.takes("attention_mask") for module in recurrent),
        takes_lengths=tuple(module.name for module in recurrent if "cu_seq_lens_q" in module.constants),
        restarts=tuple(module.name for module in scans if not module.keywords & INITIAL_STATES),
    )  # fmt: skip


@cache
def find_wrapper_problem(model_type: str) -> str | None:
    """Return how the models of a type give images to their text model in a way that is not known, or None.

    The text model must get all arguments of the pass, positions among them, and masks must be left to it. Towers read
    images one by one, so that only the text model has to know the groups.
    """
    class_name, classes = _find_classes(model_type)
    head_name = _auto_table("modeling_auto.py", IMAGE_TABLE).get(model_type, "")
    if class_name not in classes or head_name not in classes:
        return f"transformers has no model of type {model_type} that takes images"
    model, head = classes[class_name], classes[head_name]
    for module in (model, head):
        problem = module.mask_problem(guards=())
        if problem is not None:
            return f"{module.name} {problem}"
    for module, callee in ((head, model.name), (model, "text_config")):
        calls = module.calls_of(callee)
        if not calls:
            return f"{module.name} does not call its text model in the usual way"
        if not all(_hands_on_keywords(call) and "position_ids" in _argument_names(call) for call in calls):
            return f"{module.name} does not hand its arguments on to its text model"
    if "get_rope_index" in model.methods and not model.has_same_method("get_vision_position_ids", _counting_model()):
        return f"{model.name} counts the positions of images in its own way"
    return None


def _counting_model() -> ModuleSource:
    class_name, classes = _find_classes(COUNTED_BY_PATCHES)
    return classes[class_name]


def _reachable(classes: dict[str, ModuleSource], root: str) -> list[str]:
    """Return the classes that a module of class `root` makes, and those that they make; `root` first."""
    names, waiting = [root], [root]
    while waiting:
        for child in sorted(classes[waiting.pop()].children(classes)):
            if child not in names:
                names.append(child)
                waiting.append(child)
    return names


@dataclass(frozen=True)
class ModuleSource:
    """The source of a class of a modeling file, with the methods that it inherits from classes of the same file."""

    name: str
    methods: dict[str, ast.FunctionDef]
    tables: dict[str, frozenset[str]]
    """Tables of the file, such as LAYER_TYPES = {"attention": AttentionLayer}: name -> the names in it."""

    def takes(self, argument: str) -> bool:
        """Return whether `forward` has this argument."""
        forward = self.methods.get("forward")
        return forward is not None and argument in {
            parameter.arg for parameter in (*forward.args.args, *forward.args.kwonlyargs)
        }

    @property
    def takes_keywords(self) -> bool:
        """Return whether `forward` takes any further argument, as `**kwargs`."""
        forward = self.methods.get("forward")
        return forward is not None and forward.args.kwarg is not None

    def children(self, classes: dict[str, ModuleSource]) -> set[str]:
        """Return the classes of the file that the constructor names."""
        names = {name for line in self._constructor for name in self._names(line)}
        return (names & classes.keys()) - {self.name}

    @cached_property
    def calls(self) -> list[ast.Call]:
        """The calls in all methods but those that make the weights."""
        return [node for node in self._nodes if isinstance(node, ast.Call)]

    @cached_property
    def named(self) -> frozenset[str]:
        """The variables and functions that the methods name."""
        return frozenset(_name(node) for node in self._nodes)

    @property
    def is_attention(self) -> bool:
        """Whether it calls the attention functions of transformers' interface."""
        return "ALL_ATTENTION_FUNCTIONS" in self.named

    @property
    def is_recurrent(self) -> bool:
        """Whether it keeps a state in the cache."""
        return bool(self.cache_methods & STATE_UPDATES)

    @cached_property
    def constants(self) -> frozenset[Any]:
        """The constants in all methods."""
        return frozenset(node.value for node in self._nodes if isinstance(node, ast.Constant))

    @cached_property
    def keywords(self) -> frozenset[str | None]:
        """The names of the keyword arguments of all calls."""
        return frozenset(keyword.arg for call in self.calls for keyword in call.keywords)

    def mixing_problem(self) -> str | None:
        """Return how the class mixes the tokens of a row in a way that is not known, or None."""
        unknown = sorted(self.cache_methods - CACHE_METHODS)
        if unknown:
            return f"keeps more in its cache than keys, values and states ({', '.join(unknown)})"
        if "update" in self.cache_methods and not self.is_attention:
            return "does not call transformers' attention functions"
        has_convolution = any("Conv1d" in self._names(line) for line in self._constructor)
        if has_convolution and not self.is_recurrent:
            return "has a convolution over tokens whose state no cache keeps"
        return self._attention_problem() if self.is_attention else self.mask_problem()

    def incomplete_calls(self, classes: dict[str, ModuleSource], mixers: Set[str]) -> list[ast.Call]:
        """Return the calls of modules with one of the mixers inside that do not hand on all arguments of the pass."""
        handing_on = {ast.unparse(call.func) for call in self.calls if _hands_on_keywords(call)}
        incomplete = []
        for call in self.calls:
            inside = {name for child in self.called_classes(call, classes) for name in _reachable(classes, child)}
            callee, has_mask = ast.unparse(call.func), any("mask" in name for name in _argument_names(call))
            # A call without a mask beside one with all arguments is that of another kind of layer under the same name.
            is_complete = _hands_on_keywords(call) or (callee in handing_on and not has_mask)
            if inside & mixers and not is_complete and "cross" not in callee:
                incomplete.append(call)
        return incomplete

    def _attention_problem(self) -> str | None:
        calls = [call for call in self.calls if _name(call.func) == "attention_interface"]
        if not calls:
            return "does not call the attention function in the usual way"
        handed_on: set[str] = set()
        for call in calls:
            if not _hands_on_keywords(call):
                return "does not hand its arguments on to the attention function"
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            handed_on |= {_name(value) for value in values}
        stored: set[str] = set()
        for node in self._nodes:
            # Cross-attention takes the mask of another model's output as it is.
            if isinstance(node, ast.Assign) and "encoder" not in _name(node.value):
                stored |= {_name(target) for target in node.targets}
        changed = sorted(name for name in handed_on & stored if "mask" in name)
        return f"changes its mask ({', '.join(changed)})" if changed else None

    def calls_of(self, name: str) -> list[ast.Call]:
        """Return the calls in `forward` of attributes that the constructor makes of an expression with this name."""
        attributes = {attribute for attribute, names in self._attributes.items() if name in names}
        nodes = ast.walk(self.methods["forward"]) if "forward" in self.methods else ()
        return [node for node in nodes if isinstance(node, ast.Call) and _self_attribute(node.func) in attributes]

    def has_same_method(self, name: str, other: ModuleSource) -> bool:
        """Return whether both classes have a method of the same lines, apart from its documentation."""
        bodies = [_without_docstring(source.methods.get(name)) for source in (self, other)]
        return bodies[0] == bodies[1] != ""

    def mask_problem(self, guards: Sequence[str] = TEXT_GUARDS) -> str | None:
        """Return which mask lets tokens attend to others than earlier ones, or None.

        `guards`: conditions for such masks that never hold.
        """
        of_encoder: set[ast.AST] = set()  # lines about the mask of another model's output
        guarded: set[ast.AST] = set()
        for node in self._nodes:
            if isinstance(node, ast.Assign) and "encoder" in _name(node.targets[0]):
                of_encoder |= {*ast.walk(node)}
            if isinstance(node, ast.If) and any(guard in ast.unparse(node.test) for guard in guards):
                guarded |= {*ast.walk(node)}
        names = {_name(node) for node in self._nodes if node not in of_encoder}
        others = sorted(name for name in names if re.fullmatch("create_.*mask.*", name) and name not in CAUSAL_MASKS)
        if others:
            return f"has masks of another kind ({', '.join(others)})"
        for node in self._nodes:
            argument = node.arg if isinstance(node, ast.keyword) else None
            if isinstance(node, ast.Constant):  # the key of a dict of arguments
                argument = str(node.value)
            if argument in EXTRA_MASKS and node not in guarded:
                return f"lets tokens attend to later ones ({argument})"
        return None

    def called_classes(self, call: ast.Call, classes: dict[str, ModuleSource]) -> set[str]:
        """Return the classes of the module that a call runs; none for functions.

        The call is `self.attention(...)`, or `layer(...)` in a loop through `self.layers`.
        """
        attribute = _self_attribute(call.func) or self._loops.get(_name(call.func), "")
        return self._attributes.get(attribute, set()) & classes.keys()

    @cached_property
    def _attributes(self) -> dict[str, set[str]]:
        """Attribute that the constructor sets -> the names in the expression, and in those of local variables there."""
        local: dict[str, set[str]] = {}
        attributes: dict[str, set[str]] = {}
        assignments = [node for line in self._constructor for node in ast.walk(line) if isinstance(node, ast.Assign)]
        for assignment in assignments:
            names = self._names(assignment.value)
            names |= {name for variable in names for name in local.get(variable, ())}
            target = assignment.targets[0]
            attribute = _self_attribute(target)
            if attribute:
                attributes[attribute] = attributes.get(attribute, set()) | names
            else:
                local[_name(target)] = local.get(_name(target), set()) | names
        return attributes

    @cached_property
    def _loops(self) -> dict[str, str]:
        """Variable of a loop -> the attribute that it runs through: `for layer in self.layers`."""
        loops: dict[str, str] = {}
        for loop in self._nodes:
            if isinstance(loop, ast.For):
                attributes = [_self_attribute(node) for node in ast.walk(loop.iter) if _self_attribute(node)]
                variables = [node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
                loops |= {variable: attributes[0] for variable in variables if attributes}
        return loops

    @cached_property
    def cache_methods(self) -> frozenset[str]:
        """The methods of the cache that are called."""
        return frozenset(
            call.func.attr
            for call in self.calls
            if isinstance(call.func, ast.Attribute) and _name(call.func.value) in CACHE_NAMES
        )

    @property
    def _constructor(self) -> list[ast.stmt]:
        """The lines of the methods that make modules: the constructor, and others that it may call."""
        bodies = [method.body for name, method in self.methods.items() if name not in ("forward", "_init_weights")]
        return [line for body in bodies for line in body]

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        """The nodes of all methods but those that make the weights."""
        bodies = [method.body for name, method in self.methods.items() if name not in INITIALIZERS]
        return [node for body in bodies for line in body for node in ast.walk(line)]

    def _names(self, node: ast.AST) -> set[str]:
        """Return the names in an expression or a line, and those of the tables that it names."""
        names = {part.id if isinstance(part, ast.Name) else "" for part in ast.walk(node)}
        names |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
        for table in names & self.tables.keys():
            names |= self.tables[table]
        return names


def _without_docstring(method: ast.FunctionDef | None) -> str:
    """Return the lines of a method in a form that can be compared; empty without a method."""
    lines = [] if method is None else method.body
    if lines and isinstance(lines[0], ast.Expr) and isinstance(lines[0].value, ast.Constant):
        lines = lines[1:]
    return "\n".join(ast.dump(line) for line in lines)


def _hands_on_keywords(call: ast.Call) -> bool:
    """Return whether a call has **kwargs."""
    return any(keyword.arg is None for keyword in call.keywords)


def _argument_names(call: ast.Call) -> list[str]:
    """Return the variables among the arguments of a call, and the names of its keyword arguments."""
    return [*map(_name, call.args), *(keyword.arg or "" for keyword in call.keywords)]


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _self_attribute(node: ast.AST) -> str:
    """Return X of the expression self.X; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) and _name(node.value) == "self" else ""


def _find_classes(model_type: str) -> tuple[str, dict[str, ModuleSource]]:
    """Return the class of a type's text model, and the classes of the file that defines it; "" and {} without one."""
    modules = _auto_table("auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    config_class = _auto_table("auto_mappings.py", "CONFIG_MAPPING_NAMES").get(model_type, "")
    for table in (MODEL_TABLE, CAUSAL_TABLE, None):
        types = {} if table is None else _auto_table("modeling_auto.py", table)
        # The text models of some families are in no table.
        by_config = f"{config_class.removesuffix('Config')}Model" if table is None and config_class else ""
        class_name = types.get(model_type, by_config)
        # Some types are other names of one class, such as exaone of Llama's, and have no file.
        aliases = [name for name, value in types.items() if value == class_name and class_name]
        for name in [model_type, *aliases]:
            folder = _models_folder() / modules.get(name, name).replace("-", "_")
            for path in sorted(folder.glob("modeling_*.py")):
                classes = _read_file(path)
                if class_name in classes:
                    return class_name, classes
    return "", {}


@cache
def _read_file(path: Path) -> dict[str, ModuleSource]:
    return read_classes(ast.parse(path.read_text(encoding="utf-8"), str(path)))


def read_classes(module: ast.Module) -> dict[str, ModuleSource]:
    """Return the classes of a module by name."""
    tables: dict[str, frozenset[str]] = {}
    classes: dict[str, ModuleSource] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            tables[_name(node.targets[0])] = frozenset(_name(value) for value in node.value.values)
        elif isinstance(node, ast.ClassDef):
            methods: dict[str, ast.FunctionDef] = {}
            for base in reversed(node.bases):
                inherited = classes.get(_name(base))
                if inherited is not None:
                    methods |= inherited.methods
            methods |= {line.name: line for line in node.body if isinstance(line, ast.FunctionDef)}
            classes[node.name] = ModuleSource(node.name, methods, tables)
    return classes


@cache
def _auto_table(file_name: str, name: str) -> dict[str, str]:
    """Return a table of transformers' auto classes, whose rows are (model type, name)."""
    path = _models_folder() / "auto" / file_name
    lines = ast.parse(path.read_text(encoding="utf-8"), str(path)).body if path.is_file() else []
    for node in lines:
        if isinstance(node, ast.Assign) and _name(node.targets[0]) == name and isinstance(node.value, ast.Call):
            rows = ast.literal_eval(node.value.args[0])
            return {model_type: value for model_type, value in rows if isinstance(value, str)}
    return {}


def _models_folder() -> Path:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None, "a dependency"
    assert spec.origin is not None, "a package with a file"
    return Path(spec.origin).parent / "models"
