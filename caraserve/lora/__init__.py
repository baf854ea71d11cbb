"""LoRA adapters, from a file to device memory.

Modules, in the order in which an adapter meets them: `folder_contents`, `peft_config` with `target_patterns`,
`peft_fields` and `kinds`, and `peft` (files of an adapter), `manifest`, `uploads` with `upload_folders`,
`upload_body` and `upload_stream`, and `folder_watch` (where adapters come from), `registry`, `turns` and `catalog`
(names and digests), `inspections` (what is known of unchanged files), `adapter_folder` and `adapter_reader` (files that
are read), `host_loader` and `host_cache` (host memory), `manager` (loads), `device_loader` (device memory).
`start_policy`: when a cold request may start, for each loading mode; `arrival_estimates`: when layers will have
arrived. `aliases` and `settings`: what admins set for names, kept by `replicated_settings`. The layout of an adapter's
bytes is in `core/lora_layout`.
"""
