"""docling's pipeline for vision-language models behind an API: the Granite Docling preset, and a question."""

import argparse
from pathlib import Path

from docling.datamodel.base_models import ConversionStatus, InputFormat
from docling.datamodel.pipeline_options import VlmConvertOptions, VlmPipelineOptions
from docling.datamodel.pipeline_options_vlm_model import ApiVlmOptions, ResponseFormat
from docling.datamodel.vlm_engine_options import ApiVlmEngineOptions
from docling.document_converter import DocumentConverter, ImageFormatOption
from docling.pipeline.vlm_pipeline import VlmPipeline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path)
parser.add_argument("--url", required=True)
parser.add_argument("--model", required=True)
given = parser.parse_args()
api = {"url": f"{given.url}/chat/completions", "timeout": 90}


def convert(options):
    pipeline = VlmPipelineOptions(enable_remote_services=True, vlm_options=options)
    image = ImageFormatOption(pipeline_cls=VlmPipeline, pipeline_options=pipeline)
    converted = DocumentConverter(format_options={InputFormat.IMAGE: image}).convert(given.image)
    assert converted.status == ConversionStatus.SUCCESS, converted.errors
    return converted.document.export_to_markdown()


fields = {"model": given.model, "max_tokens": 24_000}
engine = ApiVlmEngineOptions(**api, params=fields)
convert(VlmConvertOptions.from_preset("granite_docling", engine_options=engine))
question = "What colour is the circle?"
print(convert(ApiVlmOptions(**api, params=fields, prompt=question, response_format=ResponseFormat.MARKDOWN)))
