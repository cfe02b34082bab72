// AI SDK for Node: an answer about an image, its stream, an object that obeys a schema, and a tool call.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { parseArgs } from 'node:util'

import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject, generateText, streamText, tool } from 'ai'
import { z } from 'zod'

const options = { url: { type: 'string' }, model: { type: 'string' } }
const { values, positionals } = parseArgs({ options, allowPositionals: true })
const provider = createOpenAICompatible({
  name: 'local',
  baseURL: values.url,
  apiKey: 'unused',
  supportsStructuredOutputs: true,
})
const image = { type: 'image', image: readFileSync(positionals[0]) }
const content = [image, { type: 'text', text: 'What colour is the circle?' }]
const fields = { model: provider(values.model), temperature: 0, messages: [{ role: 'user', content }] }

const { text } = await generateText(fields)
let streamed = ''
for await (const part of streamText(fields).textStream) streamed += part
assert.equal(streamed, text)

const schema = z.object({ colour: z.enum(['red', 'green', 'blue', 'yellow']) })
const { object } = await generateObject({ ...fields, schema })
schema.parse(object)

const note = tool({ description: 'Note a colour', inputSchema: schema })
const { toolCalls } = await generateText({ ...fields, tools: { note }, toolChoice: 'required' })
schema.parse(toolCalls[0].input)
console.log(text)
