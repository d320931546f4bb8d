// llama.cpp, asked by eval/engines/llama_cpp.py: one JSON object a line on stdin and on stdout.
//
//     node llama_cpp.mjs FOLDER THREADS     FOLDER holds node_modules/node-llama-cpp
//
// Forward passes, KV cache and the greedy choice are llama.cpp's, through node-llama-cpp. So is
// decoding without a draft. The loop with one stands here, as in llama-server (draft-simple):
// node-llama-cpp 3.22.1's own accepts one drafted token a call at most, as its list of validated
// tokens is never filled.

import {createRequire} from "node:module";
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

console.log = console.info = console.error; // stdout holds nothing but answers
const entry = path.resolve(process.argv[2], "node_modules/node-llama-cpp/dist/index.js");
const {getLlama, GgufFileType, LlamaLogLevel} = await import(pathToFileURL(entry));

const greedy = {temperature: 0};
const chosen = {generateNext: {token: true, options: greedy}};
const withLogits = {generateNext: {logits: true, options: greedy}};

const {version: nodeLlamaCpp} = createRequire(entry)("../package.json");
const threads = Number(process.argv[3]);
const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, progressLogs: false,
    maxThreads: threads, logLevel: LlamaLogLevel.warn,
});
let target, drafts, alone, drafted;

// Models are loaded once; whoever decodes has a context of its own.
async function load({files, context}) {
    const models = [];
    for (const modelPath of files)
        try {
            models.push(await llama.loadModel({modelPath, gpuLayers: 0}));
        } catch (error) {
            throw new Error(`${modelPath}: ${error.message}`);
        }
    const sequence = async (model) =>
        (await model.createContext({contextSize: context, threads})).getSequence();
    target = models[0];
    [alone, drafted] = [await sequence(target), await sequence(target)];
    drafts = [];
    for (const model of models.slice(1))
        drafts.push(await sequence(model));
    const tokens = tokensOf(target);
    return {
        dtype: GgufFileType[target.fileInfo.metadata.general.file_type]
            .replace(/^(MOSTLY|ALL)_/, "").toLowerCase(),
        versions: {"llama.cpp": llama.llamaCppRelease.release, "node-llama-cpp": nodeLlamaCpp},
        stops: [...tokens.keys()].filter((token) => target.isEogToken(token)),
        models: models.map((model) => about(model, tokens)),
    };
}

function about(model, targetTokens) {
    const {block_count: layers, embedding_length: width, attention} =
        model.fileInfo.architectureMetadata;
    const {head_count: heads, head_count_kv: kvHeads = heads} = attention;
    const [keys, values] = [attention.key_length, attention.value_length]
        .map((length) => length ?? width / heads);
    const tokens = tokensOf(model);
    const other = tokens.findIndex((token, id) => id < targetTokens.length && token !== targetTokens[id]);
    return {
        bytes: model.size,
        kv_bytes_per_token: 2 * layers * kvHeads * (keys + values), // in f16
        vocab_size: tokens.length,
        first_other_token: other < 0 ? null : [other, targetTokens[other], tokens[other]],
    };
}

function tokensOf(model) {
    return model.fileInfo.metadata.tokenizer.ggml.tokens;
}

// The target's greedy text. A block is [drafted, emitted].
async function* plainBlocks(ids) {
    for await (const token of alone.evaluate(ids, {...greedy, yieldEogToken: true}))
        yield [[], [token]];
}

async function* draftedBlocks(ids, draft, gamma, most) {
    let last = await next(drafted, ids);
    yield [[], [last]];
    let unseen = [...ids, last]; // by the draft
    for (let done = 1; done < most;) {
        const start = drafted.nextTokenIndex;
        const guesses = [];
        // so that no token is drafted which the limit would cut
        while (guesses.length < Math.min(gamma, most - done - 1)) {
            guesses.push(await next(draft, unseen));
            unseen = guesses.slice(-1);
        }
        const answers = await drafted.controlledEvaluate(
            [last, ...guesses].map((token) => [token, chosen]));
        const choices = answers.map(({next}) => next.token);
        let accepted = 0;
        while (accepted < guesses.length && guesses[accepted] === choices[accepted])
            accepted++;
        await cut(drafted, start + 1 + accepted);
        await cut(draft, start + 1 + accepted);
        last = choices[accepted];
        // a draft has not seen the last token that it made
        unseen = accepted === guesses.length ? [...guesses.slice(-1), last] : [last];
        const emitted = [...guesses.slice(0, accepted), last];
        done += emitted.length;
        yield [guesses, emitted];
    }
}

async function next(sequence, tokens) {
    return (await last(sequence, tokens, chosen)).next.token;
}

async function cut(sequence, length) {
    if (sequence.nextTokenIndex > length)
        await sequence.eraseContextTokenRanges([{start: length, end: sequence.nextTokenIndex}]);
}

async function decode({ids, draft, gamma, max_new_tokens: most}) {
    const sequences = draft === null ? [alone] : [drafted, drafts[draft]];
    for (const sequence of sequences)
        await sequence.clearHistory();
    const calls = {drafted: [], emitted: [], seconds: []};
    let done = 0, before = performance.now();
    const blocks = draft === null
        ? plainBlocks(ids)
        : draftedBlocks(ids, drafts[draft], gamma, most);
    for await (const [guesses, emitted] of blocks) {
        const now = performance.now();
        const stop = emitted.findIndex((token) => target.isEogToken(token));
        const kept = stop < 0 ? emitted : emitted.slice(0, stop + 1);
        calls.drafted.push(guesses);
        calls.emitted.push(kept);
        calls.seconds.push((now - before) / 1000);
        before = now;
        done += kept.length;
        if (stop >= 0 || done >= most)
            break;
    }
    return calls;
}

// The target's logits for token number `position` of an answer: [one token a call, as drafted].
async function logits({ids, drafted: guesses, emitted, position}) {
    const text = emitted.flat();
    await alone.clearHistory();
    let single = await last(alone, ids, withLogits);
    for (const token of text.slice(0, position))
        single = await last(alone, [token], withLogits);
    await drafted.clearHistory();
    let wide = [await last(drafted, ids, withLogits)];
    let before = 0, done = emitted[0].length;
    for (let call = 1; done <= position; call++) {
        const input = [text[done - 1], ...guesses[call]].map((token) => [token, withLogits]);
        const start = drafted.nextTokenIndex;
        wide = await drafted.controlledEvaluate(input);
        before = done;
        done += emitted[call].length;
        await cut(drafted, start + emitted[call].length);
    }
    return [single, wide[position - before]].map(({next}) => byToken(next.logits));
}

async function last(sequence, tokens, wanted) {
    const input = [...tokens.slice(0, -1), [tokens.at(-1), wanted]];
    return (await sequence.controlledEvaluate(input)).at(-1);
}

function byToken(logits) {
    return Array.from({length: logits.size}, (_, token) => logits.get(token));
}

const answers = {load, decode, logits};
for await (const line of readline.createInterface({input: process.stdin})) {
    let answer;
    try {
        const {ask, ...about} = JSON.parse(line);
        answer = {answer: await answers[ask](about)};
    } catch (error) {
        console.error(error);
        answer = {error: error.message};
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
}
process.exit(0);
