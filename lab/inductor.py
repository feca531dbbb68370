"""What the compiled network asks of a GPU, counted without one: the launches and bytes of both its passes.

Inductor schedules the forward and the backward pass of a network without storage as for an H100, in bf16 as train.py
runs it with --compile. Every kernel that it fuses, and every product or operator that it leaves as it is, is one launch
that reads its inputs and writes its outputs once. Loss and optimizer are not compiled; lab/count.py counts them. This
takes parts of torch that are not documented, as PyTorch 2.13 has them.
"""
import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, ir, scheduler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph, reinplace
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from lab import count
from nets import fast, kernels

H100 = SimpleNamespace(name='', gcnArchName='', major=9, minor=0, multi_processor_count=132, warp_size=32,
                       regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
                       shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20)
CUDA = torch.device('cuda', 0)


def network(config, samples):
    """{'compiled launches', 'compiled gb'} of a config's network; each layer after two adds what the third does."""
    two, three = ([sum(column) for column in zip(*passes(dataclasses.replace(config, depth=depth), samples))]
                  for depth in (2, 3))
    launches, size = (a + (config.depth - 2) * (b - a) for a, b in zip(two, three))
    return {'compiled launches': launches, 'compiled gb': size / 1e9}


def passes(config, samples):
    """[(launches, bytes) of the forward pass, of the backward pass] as Inductor schedules them."""
    mode, counts = FakeTensorMode(allow_non_fake_inputs=True), []

    def schedule(graph):
        graph.init_wrapper_code()
        graph._update_scheduler()
        nodes = [node for node in graph.scheduler.nodes if not isinstance(node, scheduler.NopKernelSchedulerNode)
                 and not isinstance(node.node, ir.MultiOutput)]         # its bytes are those of its operator
        counts.append((len(nodes), sum(node.get_read_write_buffers_sizes() for node in nodes)))
        raise RuntimeError('scheduled')                         # its code is not needed

    def compiler(graph, inputs, is_backward=False):
        """Move a graph from the CPU, where autograd can run without a GPU, and schedule it there."""
        outputs = [getattr(node, 'meta', {}).get('val') for node in graph.graph.find_nodes(op='output')[0].args[0]]
        on = lambda x, place: torch.empty_like(x, device=place) if isinstance(x, torch.Tensor) else x
        for node in graph.graph.nodes:
            node.kwargs = {key: CUDA if key == 'device' else value for key, value in node.kwargs.items()}
        with mode:
            inputs = [on(x, CUDA) for x in inputs]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
        graph.recompile()
        try:
            compile_fx.compile_fx_inner(graph, inputs, is_backward=is_backward)
        except Exception as error:
            if 'scheduled' not in str(error):
                raise
        return make_boxed_func(lambda *_: [on(x, 'cpu') for x in outputs])

    def partition(graph, inputs, **kwargs):
        joint_graph.joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler='inductor', **kwargs)

    @torch.autocast('cpu', torch.bfloat16)
    def run(*tensors):
        return torch.func.functional_call(model, dict(zip(state, tensors)), tensors[-1:])
    with torch.device('meta'):
        model = fast.Fast(config)
        model.one_backward = True
        n = config.resolution[0] // config.patch                # the matrices have no values here, so they are inputs
        model.register_buffer('fourier_True', torch.empty(2 * min(n // 2 + 1, config.modes), n))
        model.register_buffer('fourier_False', torch.empty(2 * min(n, 2 * config.modes), 2 * n))
    state, always = dict([*model.named_parameters(), *model.named_buffers()]), lambda value: lambda *_, **__: value
    patches = [
        (kernels, 'usable', lambda x, config: not config.ablate and config.post_norm),
        (fast, 'fourier_matrix', lambda n, modes, half, *_: (F := getattr(model, f'fourier_{half}'), F.T)),
        (scheduler, 'has_triton', always(True)), (torch.compiler, 'is_compiling', always(True)),
        (compile_fx.GraphLowering, 'compile_to_module', schedule),
        (reinplace, '_inplace_generalized_scatter', lambda inp, src, view_ops: inp),
        (compile_fx, '_check_triton_bf16_support', always(None)), (CudaInterface, 'get_compute_capability', always(90)),
        *((owner, 'get_device_properties', always(H100)) for owner in (torch.cuda, CudaInterface)),
        (torch.cuda, 'get_device_capability', always((9, 0))), (torch.cuda, 'current_device', always(0))]
    with contextlib.ExitStack() as stack:
        for context in (*(mock.patch.object(*patch) for patch in patches), mode, count.Rules(),
                        compile_fx.config.patch(force_disable_caches=True), tracing(TracingContext(mode))):
            stack.enter_context(context)
        tensors = [torch.empty(x.shape, requires_grad=x.requires_grad) for x in state.values()]
        step = aot_function(run, compiler, partial(compiler, is_backward=True), partition, select_decomp_table())
        step(*tensors, torch.empty(samples, config.frames, *config.resolution, config.channels)).sum().backward()
    return counts
