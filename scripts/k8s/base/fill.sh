#!/bin/sh
# Fills a pod's volume before its server starts, with the base model and with adapters.
#
# MODEL: a repository of the Hugging Face Hub, or `demo` for the demo of the image, with its adapters.
# ADAPTERS: NAME=REPOSITORY, with spaces between them.
#
# What is there stays as it is and needs no network. A download that was cut off goes on at the next start.
set -eu
data=${DATA:-/data}

# fetch REPOSITORY FOLDER
fetch() {
    if [ -d "$2" ]; then return; fi
    part=$(dirname "$2")/.$(basename "$2") # the server takes no adapter from a folder whose name begins with a dot
    mkdir -p "$part"
    hf download "$1" --local-dir "$part" \
        --exclude 'original/*' --exclude 'onnx/*' --exclude '*.bin' --exclude '*.pth' --exclude '*.gguf'
    mv "$part" "$2"
}

# copy FOLDER FOLDER
copy() {
    if [ -d "$2" ]; then return; fi
    rm -rf "$2.part"
    mkdir -p "$(dirname "$2")"
    cp -r "$1" "$2.part"
    mv "$2.part" "$2"
}

if [ "$MODEL" = demo ]; then
    demo=$(python -c 'from caraserve import demo; print(demo.demo_folder())')
    copy "$demo/model" "$data/models/demo"
    copy "$demo/adapters" "$data/adapters"
else
    fetch "$MODEL" "$data/models/$MODEL"
fi
mkdir -p "$data/adapters"
for adapter in ${ADAPTERS:-}; do
    fetch "${adapter#*=}" "$data/adapters/${adapter%%=*}"
done
