# A managed endpoint on Vertex AI (docs/serving.md). First build an image that holds both models,
# and push it to Artifact Registry:
#     FROM vllm/vllm-openai:v0.32.0
#     COPY target /models/target
#     COPY draft /models/draft
# `^|^` makes `|` the separator of the arguments, because the JSON has commas.
gcloud ai models upload --region=us-central1 --display-name=draftsmith-pair \
    --container-image-uri=us-central1-docker.pkg.dev/PROJECT/models/draftsmith-pair:1 \
    --container-command=vllm \
    --container-args='^|^serve|/models/target|--served-model-name|target|--port|8080|--max-model-len|8192|--speculative-config|{"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 4}' \
    --container-ports=8080 --container-health-route=/health --container-predict-route=/v1/completions \
    --container-shared-memory-size-mb=8192
gcloud ai endpoints create --region=us-central1 --display-name=draftsmith-pair
gcloud ai endpoints deploy-model ENDPOINT_ID --region=us-central1 --model=MODEL_ID --display-name=draftsmith-pair \
    --machine-type=g2-standard-12 --accelerator=type=nvidia-l4,count=1 --min-replica-count=1 --max-replica-count=1 \
    --traffic-split=0=100
gcloud ai endpoints raw-predict ENDPOINT_ID --region=us-central1 --http-headers=Content-Type=application/json \
    --request='{"model": "target", "prompt": "def mean(values):", "max_tokens": 64, "temperature": 0}'
