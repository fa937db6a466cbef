// Checks a value against a JSON schema: the keywords that bound its form, and names of those that aren't checked.

const MAX_DEPTH = 64;
const NOTES = new Set([
  "$schema",
  "$id",
  "$defs",
  "definitions",
  "title",
  "description",
  "default",
  "examples",
  "$comment",
]);

// {faults, unchecked}: what is wrong, each with its place, and the keywords that weren't looked at.
export function check(schema, value) {
  const report = { faults: [], unchecked: new Set() };
  visit(schema, value, "", { root: schema, report }, 0);
  return { faults: report.faults.slice(0, 10), unchecked: [...report.unchecked] };
}

function visit(schema, value, place, context, depth) {
  const fault = (text) => context.report.faults.push(`${place || "the reply"} ${text}`);
  if (schema === false) return fault("isn't allowed");
  if (schema === true || typeof schema !== "object" || schema === null) return undefined;
  if (depth > MAX_DEPTH) return context.report.unchecked.add("what is nested deeper");
  for (const [keyword, wanted] of Object.entries(schema)) {
    const rule = RULES[keyword];
    if (rule) rule({ wanted, value, place, context, depth, schema, fault });
    else if (!NOTES.has(keyword)) context.report.unchecked.add(keyword);
  }
  return undefined;
}

const kind = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);
const same = (a, b) => JSON.stringify(sorted(a)) === JSON.stringify(sorted(b));
const isObject = (value) => kind(value) === "object";

function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (!isObject(value)) return value;
  return Object.fromEntries(
    Object.keys(value)
      .sort()
      .map((key) => [key, sorted(value[key])]),
  );
}

function isType(value, name) {
  return name === "integer" ? Number.isInteger(value) : name === kind(value);
}

// How many of several schemas a value obeys.
function matches({ wanted, value, context, depth }) {
  const obeys = (each) => {
    const report = { faults: [], unchecked: context.report.unchecked };
    visit(each, value, "", { root: context.root, report }, depth + 1);
    return report.faults.length === 0;
  };
  return wanted.filter(obeys).length;
}

function target(root, reference) {
  if (!reference.startsWith("#")) return undefined;
  const names = reference.slice(1).split("/").slice(1);
  const plain = (name) => decodeURIComponent(name).replaceAll("~1", "/").replaceAll("~0", "~");
  return names.reduce((at, name) => at?.[plain(name)], root);
}

const bound =
  (type, holds, words) =>
  ({ wanted, value, fault }) => {
    if (kind(value) === type && !holds(value, wanted)) fault(`${words} ${wanted}`);
  };

const RULES = {
  type: ({ wanted, value, fault }) => {
    const names = [].concat(wanted);
    if (!names.some((name) => isType(value, name))) fault(`is of type ${kind(value)}, not ${names.join(" or ")}`);
  },
  enum: ({ wanted, value, fault }) => {
    if (!wanted.some((it) => same(it, value))) fault(`is none of ${JSON.stringify(wanted)}`);
  },
  const: ({ wanted, value, fault }) => {
    if (!same(wanted, value)) fault(`isn't ${JSON.stringify(wanted)}`);
  },
  required: ({ wanted, value, fault }) => {
    if (!isObject(value)) return;
    for (const name of wanted) if (!Object.hasOwn(value, name)) fault(`lacks ${name}`);
  },
  properties: ({ wanted, value, place, context, depth }) => {
    if (!isObject(value)) return;
    for (const [name, each] of Object.entries(wanted)) {
      if (Object.hasOwn(value, name)) visit(each, value[name], `${place}/${name}`, context, depth + 1);
    }
  },
  additionalProperties: ({ wanted, value, place, context, depth, schema }) => {
    if (!isObject(value) || schema.patternProperties) return;
    for (const name of Object.keys(value)) {
      if (!Object.hasOwn(schema.properties || {}, name))
        visit(wanted, value[name], `${place}/${name}`, context, depth + 1);
    }
  },
  items: ({ wanted, value, place, context, depth, schema }) => {
    if (!Array.isArray(value)) return;
    const from = schema.prefixItems?.length || 0;
    value.slice(from).forEach((it, at) => visit(wanted, it, `${place}/${from + at}`, context, depth + 1));
  },
  prefixItems: ({ wanted, value, place, context, depth }) => {
    if (!Array.isArray(value)) return;
    wanted
      .slice(0, value.length)
      .forEach((each, at) => visit(each, value[at], `${place}/${at}`, context, depth + 1));
  },
  allOf: ({ wanted, value, place, context, depth }) => {
    for (const each of wanted) visit(each, value, place, context, depth + 1);
  },
  anyOf: (it) => {
    if (!matches(it)) it.fault("obeys none of several schemas");
  },
  oneOf: (it) => {
    const count = matches(it);
    if (count !== 1) it.fault(`obeys ${count} of several schemas, not one`);
  },
  not: (it) => {
    if (matches({ ...it, wanted: [it.wanted] })) it.fault("obeys a schema that it mustn't");
  },
  $ref: ({ wanted, value, place, context, depth }) => {
    const schema = target(context.root, wanted);
    if (schema === undefined) context.report.unchecked.add("$ref");
    else visit(schema, value, place, context, depth + 1);
  },
  minimum: bound("number", (value, wanted) => value >= wanted, "is below"),
  maximum: bound("number", (value, wanted) => value <= wanted, "is above"),
  exclusiveMinimum: bound("number", (value, wanted) => value > wanted, "isn't above"),
  exclusiveMaximum: bound("number", (value, wanted) => value < wanted, "isn't below"),
  minLength: bound("string", (value, wanted) => [...value].length >= wanted, "has fewer characters than"),
  maxLength: bound("string", (value, wanted) => [...value].length <= wanted, "has more characters than"),
  minItems: bound("array", (value, wanted) => value.length >= wanted, "has fewer items than"),
  maxItems: bound("array", (value, wanted) => value.length <= wanted, "has more items than"),
};
