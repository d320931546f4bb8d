// What llama.cpp makes of GGUF files: node llama_cpp.mjs FOLDER < {files, texts, prompts, most}
//
// FOLDER holds node_modules/node-llama-cpp. For each file: the ids of each text, and for each
// prompt (ids) its greedy continuation and the logits of the first token of it.
import {readFileSync} from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const entry = path.join(process.argv[2], "node_modules/node-llama-cpp/dist/index.js");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry));
const {files, texts, prompts, most} = JSON.parse(readFileSync(0, "utf-8"));
const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, logLevel: LlamaLogLevel.error,
    maxThreads: 1, // more wait for each other by spinning, which a busy machine pays for
});
const answers = [];
for (const modelPath of files) {
    const model = await llama.loadModel({modelPath, gpuLayers: 0});
    const context = await model.createContext({contextSize: 256, threads: 1});
    const sequence = context.getSequence();
    const continued = [];
    for (const prompt of prompts) {
        await sequence.clearHistory();
        const output = await sequence.controlledEvaluate(
            [...prompt.slice(0, -1), [prompt.at(-1), {generateNext: {logits: true}}]]);
        const logits = output.at(-1).next.logits;
        const found = {ids: [], first: Array.from({length: logits.size}, (_, i) => logits.get(i))};
        await sequence.clearHistory();
        for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
            found.ids.push(token);
            if (found.ids.length === most || model.isEogToken(token))
                break;
        }
        continued.push(found);
    }
    answers.push({ids: texts.map((text) => model.tokenize(text, true)), continued});
    await model.dispose();
}
process.stdout.write(JSON.stringify(answers) + "\n", () => process.exit(0));
