"""Schemas of the kinds that Kubernetes itself does not define, and of the picker's configuration: of the fields that
`scripts/k8s` uses and no others, so that a misspelt one is an error. Written after the types of

- Gateway API Inference Extension v1.5: InferencePool v1
- Gateway API v1.4: Gateway and HTTPRoute v1
- Prometheus operator v0.85: PodMonitor v1
- llm-d router v0.10: EndpointPickerConfig v1alpha1, and the parameters of the plugins named here
"""

import re
from typing import Any


class Schema(dict[str, Any]):
    """A JSON schema."""


def schema(shape: Any) -> Schema:
    """The schema of a shape: a dict is an object with these fields alone, those with `?` optional; a list has one item
    or more of its shape; a set is one of its values, and a pattern a text that has it."""
    match shape:
        case Schema():
            return shape
        case dict():
            fields = {name.removesuffix("?"): schema(field) for name, field in shape.items()}
            required = [name for name in shape if name in fields]
            return Schema(type="object", properties=fields, required=required, additionalProperties=False)
        case [item]:
            return Schema(type="array", items=schema(item), minItems=1)
        case re.Pattern():
            return Schema(type="string", pattern=shape.pattern)
    return Schema(enum=sorted(shape))


def at_most(number: int, item: Any) -> Schema:
    return Schema(schema([item]), maxItems=number)


def kind(name: str, api: str, spec: Any) -> Schema:
    meta = {"name": NAME, "namespace": NAME, "labels?": LABELS}
    return schema({"apiVersion": {api}, "kind": {name}, "metadata": meta, "spec": spec})


PORT = Schema(type="integer", minimum=1, maximum=65535)
NAME = re.compile(r"^(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
TEXT = re.compile(r"(?s).")
LABEL = re.compile(r"^(?=.{0,63}$)(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
LABELS = Schema(type="object", minProperties=1, additionalProperties=schema(LABEL))
METRIC = re.compile(r'^[a-zA-Z_:][a-zA-Z0-9_:]*(\{[a-z_]+="[^"]*"\})?$')
PATH = re.compile(r"^/.{0,1023}$")
SELECTOR = {"matchLabels": LABELS}

SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("InferencePool", "inference.networking.k8s.io/v1"): {
        "selector": SELECTOR,
        "targetPorts": at_most(8, {"number": PORT}),
        # A port is required where the picker is a Service, which is the default kind.
        "endpointPickerRef": {"name": NAME, "port": {"number": PORT}, "failureMode?": {"FailOpen", "FailClose"}},
    },
    ("Gateway", "gateway.networking.k8s.io/v1"): {
        "gatewayClassName": NAME,
        "listeners": at_most(64, {"name": NAME, "port": PORT, "protocol": {"HTTP"}}),
    },
    ("HTTPRoute", "gateway.networking.k8s.io/v1"): {
        "parentRefs": at_most(32, {"name": NAME}),
        "rules": at_most(
            16,
            {
                "matches": [{"path": {"type": {"Exact", "PathPrefix", "RegularExpression"}, "value": PATH}}],
                "backendRefs": [{"group": {"inference.networking.k8s.io"}, "kind": {"InferencePool"}, "name": NAME}],
                "timeouts?": {"request": re.compile(r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")},
            },
        ),
    },
    ("PodMonitor", "monitoring.coreos.com/v1"): {
        "selector": SELECTOR,
        "podMetricsEndpoints": [{"port": NAME, "path?": PATH, "interval?": re.compile(r"^[0-9]+(ms|s|m|h)$")}],
    },
}
CUSTOM = {name: kind(name, api, spec) for (name, api), spec in SPECS.items()}

ENGINE = {
    "name": TEXT,
    "queuedRequestsSpec": METRIC,
    "runningRequestsSpec": METRIC,
    "kvUsageSpec": METRIC,
    "loraSpec?": METRIC,
    "cacheInfoSpec?": METRIC,
    "customMetrics?": [{"attributeKey": TEXT, "metricSpec": METRIC}],
}
PLUGINS: dict[str, dict[str, Any]] = {
    "metrics-data-source": {},
    "core-metrics-extractor": {"parameters": {"engineConfigs": [ENGINE]}},
    "endpoint-attribute-scorer": {
        "parameters": {
            "attributeKey": TEXT,
            "algorithm": {
                "type": {"linear_lower_is_better", "linear_higher_is_better"},
                "normalization?": {"adaptiveRange?": {}},
            },
        }
    },
    **{f"{name}-scorer": {} for name in ("lora-affinity", "prefix-cache", "kv-cache-utilization")},
    "max-score-picker": {},
    "single-profile-handler": {},
}
PICKER_CONFIG = schema(
    {
        "apiVersion": {"llm-d.ai/v1alpha1"},
        "kind": {"EndpointPickerConfig"},
        "plugins": [Schema(oneOf=[schema({"type": {name}, "name?": TEXT} | own) for name, own in PLUGINS.items()])],
        "dataLayer": {"sources": [{"pluginRef": TEXT, "extractors": [{"pluginRef": TEXT}]}]},
        "schedulingProfiles": [
            {"name": TEXT, "plugins": [{"pluginRef": TEXT, "weight?": Schema(type="number", exclusiveMinimum=0)}]}
        ],
    }
)
