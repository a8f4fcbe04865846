# Hotrow in Amazon SageMaker, which puts the model into /opt/ml/model and asks port 8080.
# In the root of the repository: docker build -f docker/sagemaker.Dockerfile -t hotrow:sagemaker .
# hadolint ignore=DL3006
FROM hotrow:cpu
ENV HOTROW_HTTP_PORT=8080
EXPOSE 8080
# SageMaker starts the image with the word `serve`, which the shell takes as its own name.
ENTRYPOINT ["sh", "-c", "exec hotrow serve /opt/ml/model"]
CMD []
