"""Schemas of the kinds that Kubernetes itself does not define, and of the picker's configuration: of the fields that
`scripts/k8s` uses and no others, so that a misspelt one is an error. Written after the types of

- Gateway API Inference Extension v1.5: InferencePool v1
- Gateway API v1.4: Gateway and HTTPRoute v1
- Prometheus operator v0.85: PodMonitor v1
- llm-d router v0.10: EndpointPickerConfig v1alpha1, and the parameters of the plugins named here
"""

from typing import Any

Schema = dict[str, Any]

PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT: Schema = {"type": "string", "minLength": 1}
LABELS: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {
        "type": "string",
        "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
        "maxLength": 63,
    },
}
METRIC: Schema = {"type": "string", "pattern": r'^[a-zA-Z_:][a-zA-Z0-9_:]*(\{[a-z_]+="[^"]*"\})?$'}


def closed(required: Schema, optional: Schema | None = None) -> Schema:
    """An object with these fields alone."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def listed(item: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": item, "minItems": 1} | ({} if most is None else {"maxItems": most})


def kind(name: str, api: str, spec: Schema) -> Schema:
    meta = closed({"name": NAME, "namespace": NAME}, {"labels": LABELS})
    return closed({"apiVersion": {"const": api}, "kind": {"const": name}, "metadata": meta, "spec": spec})


SELECTOR = closed({"matchLabels": LABELS})

INFERENCE_POOL = kind(
    "InferencePool",
    "inference.networking.k8s.io/v1",
    closed(
        {
            "selector": SELECTOR,
            "targetPorts": listed(closed({"number": PORT}), most=8),
            # A port is required where the picker is a Service, which is the default kind.
            "endpointPickerRef": closed(
                {"name": NAME, "port": closed({"number": PORT})}, {"failureMode": {"enum": ["FailOpen", "FailClose"]}}
            ),
        }
    ),
)

GATEWAY = kind(
    "Gateway",
    "gateway.networking.k8s.io/v1",
    closed(
        {
            "gatewayClassName": NAME,
            "listeners": listed(closed({"name": NAME, "port": PORT, "protocol": {"enum": ["HTTP"]}}), most=64),
        }
    ),
)

HTTP_ROUTE = kind(
    "HTTPRoute",
    "gateway.networking.k8s.io/v1",
    closed(
        {
            "parentRefs": listed(closed({"name": NAME}), most=32),
            "rules": listed(
                closed(
                    {
                        "matches": listed(
                            closed(
                                {
                                    "path": closed(
                                        {
                                            "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                            "value": {"type": "string", "pattern": "^/", "maxLength": 1024},
                                        }
                                    )
                                }
                            )
                        ),
                        "backendRefs": listed(
                            closed(
                                {
                                    "group": {"const": "inference.networking.k8s.io"},
                                    "kind": {"const": "InferencePool"},
                                    "name": NAME,
                                }
                            )
                        ),
                    },
                    {"timeouts": closed({"request": {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}})},
                ),
                most=16,
            ),
        }
    ),
)

POD_MONITOR = kind(
    "PodMonitor",
    "monitoring.coreos.com/v1",
    closed(
        {
            "selector": SELECTOR,
            "podMetricsEndpoints": listed(
                closed(
                    {"port": NAME},
                    {
                        "path": {"type": "string", "pattern": "^/"},
                        "interval": {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"},
                    },
                )
            ),
        }
    ),
)

CUSTOM = {
    schema["properties"]["kind"]["const"]: schema for schema in (INFERENCE_POOL, GATEWAY, HTTP_ROUTE, POD_MONITOR)
}

ENGINE = closed(
    {"name": TEXT, "queuedRequestsSpec": METRIC, "runningRequestsSpec": METRIC, "kvUsageSpec": METRIC},
    {
        "loraSpec": METRIC,
        "cacheInfoSpec": METRIC,
        "customMetrics": listed(closed({"attributeKey": TEXT, "metricSpec": METRIC})),
    },
)

PLUGIN_PARAMETERS: dict[str, Schema | None] = {
    "metrics-data-source": None,
    "core-metrics-extractor": closed({"engineConfigs": listed(ENGINE)}),
    "endpoint-attribute-scorer": closed(
        {
            "attributeKey": TEXT,
            "algorithm": closed(
                {"type": {"enum": ["linear_lower_is_better", "linear_higher_is_better"]}},
                {"normalization": closed({}, {"adaptiveRange": {"type": "object", "maxProperties": 0}})},
            ),
        }
    ),
    "lora-affinity-scorer": None,
    "prefix-cache-scorer": None,
    "kv-cache-utilization-scorer": None,
    "max-score-picker": None,
    "single-profile-handler": None,
}


def _plugin(name: str, parameters: Schema | None) -> Schema:
    fixed = {"type": {"const": name}}
    return closed(fixed if parameters is None else fixed | {"parameters": parameters}, {"name": TEXT})


PICKER_CONFIG = closed(
    {
        "apiVersion": {"const": "llm-d.ai/v1alpha1"},
        "kind": {"const": "EndpointPickerConfig"},
        "plugins": listed({"oneOf": [_plugin(*plugin) for plugin in PLUGIN_PARAMETERS.items()]}),
        "dataLayer": closed(
            {"sources": listed(closed({"pluginRef": TEXT, "extractors": listed(closed({"pluginRef": TEXT}))}))}
        ),
        "schedulingProfiles": listed(
            closed(
                {
                    "name": TEXT,
                    "plugins": listed(
                        closed({"pluginRef": TEXT}, {"weight": {"type": "number", "exclusiveMinimum": 0}})
                    ),
                }
            )
        ),
    }
)
