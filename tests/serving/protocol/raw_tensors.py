"""Requests of raw features in KServe's protocol, as clients make them, and the batches of them."""

import struct

import tritonclient.http
from tritonclient.grpc import service_pb2

from serving.protocol.ctr import batch_of, signature_of
from serving.protocol.infer import InferDecoder
from serving.protocol.messages import MessageDecoder, read_message


def in_http(given, binary):
    """Decode the body of the genuine client."""
    inputs = []
    for name, (datatype, array) in given.items():
        tensor = tritonclient.http.InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array, binary_data=binary)
        inputs.append(tensor)
    body, header = tritonclient.http.InferenceServerClient.generate_request_body(inputs)
    return body, None if header is None else str(header)


def raw_bytes(datatype, array):
    if datatype != "BYTES":
        return array.tobytes()
    return b"".join(struct.pack("<I", len(text)) + text for text in array.reshape(-1))


def decode_http(config, reader, given, binary=True):
    decoder = InferDecoder(signature_of(config, reader))
    return batch_of(config, decoder.decode(*in_http(given, binary)).inputs, reader)


def decode_grpc(config, reader, given, raw):
    message = service_pb2.ModelInferRequest(model_name="m")
    fields = {"INT64": "int64", "INT32": "int", "FP32": "fp32", "BOOL": "bool", "BYTES": "bytes"}
    for name, (datatype, array) in given.items():
        tensor = message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if raw:
            message.raw_input_contents.append(raw_bytes(datatype, array))
        else:
            getattr(tensor.contents, f"{fields[datatype]}_contents").extend(array.reshape(-1).tolist())
    request = MessageDecoder(signature_of(config, reader)).decode(read_message(message.SerializeToString()))
    return batch_of(config, request.inputs, reader)
